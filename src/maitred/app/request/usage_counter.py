"""Counts the usage of an upstream answer: estimated until the server reports it; corrects the estimation ratios.

Tokens are estimated from the text until the server reports its usage, which replaces the estimate. Without a report,
the usage is marked as estimated.

A report is checked against what is known of the request. A count of the prompt must fit what was sent, and a count of
the answer what was granted and what was seen: one that does not is replaced by the estimate, which is marked. The
answer itself is checked, too: a choice with certainly more tokens than were granted is over its grant, because its
server ignores `max_tokens`, and ends there.
"""

import msgspec

from maitred.core.context import RequestContext
from maitred.core.inference import AnswerPrefix
from maitred.core.request import Usage
from maitred.core.text_replica import TextBatch
from maitred.routing.catalog import TextModel
from maitred.text.estimate import estimate, estimate_members

_ADDED_PROMPT_TOKENS = 16_384
"""Most tokens that a server may add to a prompt: its template, instructions, or documents that it retrieves."""
_MAX_BYTES_PER_TOKEN = 128
"""Most bytes of a token in common vocabularies; their longest tokens are runs of spaces."""
_ASCII_BYTES_PER_ESTIMATED_TOKEN = 4
_MIN_COUNTED_SHARE = _ASCII_BYTES_PER_ESTIMATED_TOKEN / _MAX_BYTES_PER_TOKEN
"""Smallest credible quotient of a count and the raw estimate."""
_CERTAIN_FACTOR = 2.0
"""An answer certainly has more tokens than were granted if its estimate is this many times as high, and...

The estimate of a text is rarely wrong by this factor once the ratio is learnt."""
_CERTAIN_TOKENS = 32
"""...this much higher: a short text says little."""
_MAX_CALLS = 1_024
"""Most tool calls of an answer, of all choices together."""
_SEVERAL_TOKENS_PER_CHUNK = 2.0
"""The chunks of an answer have several tokens each if its estimate is this many times their number."""
_MAX_CHUNKS_PER_TOKEN = 8
"""Some servers send every character in a chunk of its own; none needs more chunks for a token."""


class OutputGrant(msgspec.Struct, frozen=True):
    """Output tokens that were granted to a request."""

    choice_tokens: int
    """Output tokens of each choice."""
    choices: int
    """Choices of all prompts together."""
    max_prompt_tokens: int
    """Most tokens of all prompts together that fit the model's context window."""

    @property
    def tokens(self) -> int:
        """Returns the output tokens of all choices together."""
        return self.choice_tokens * self.choices


class UpstreamUsageCounter:
    """Usage of one upstream answer, counted or estimated, written into its request context.

    Args:
        model: Has the estimation ratios to update.
        context: Request context with the reserved prompt tokens; gets the usage.
        estimated_prompt: Raw estimate of the prompt tokens; None: they were counted.
        grant: The granted output tokens.

    Attributes:
        choices_over_grant: Choices that certainly have more tokens than were granted, each with the share of its last
            text that is not over it. Later text is not counted.
        has_estimates: Whether the output tokens of an earlier server are estimates.
    """

    def __init__(
        self, model: TextModel, context: RequestContext, estimated_prompt: float | None, grant: OutputGrant
    ) -> None:
        self._model = model
        self._context = context
        self._estimated_prompt = estimated_prompt
        self._grant = grant
        self._reserved_prompt_tokens = context.prompt_tokens
        raw_prompt = context.prompt_tokens if estimated_prompt is None else estimated_prompt
        # A token has at least one byte, and an estimated token at most four.
        self._max_prompt_tokens = min(
            grant.max_prompt_tokens, int(_ASCII_BYTES_PER_ESTIMATED_TOKEN * raw_prompt) + _ADDED_PROMPT_TOKENS
        )
        self._min_prompt_tokens = max(1.0, _MIN_COUNTED_SHARE * raw_prompt)
        self._certain_tokens = _CERTAIN_FACTOR * grant.choice_tokens + _CERTAIN_TOKENS
        """Estimated tokens from which on a choice is over its grant."""
        self._certain_chunks = _MAX_CHUNKS_PER_TOKEN * (grant.tokens + _CERTAIN_TOKENS)
        self._estimated_output_tokens = 0.0
        self._choice_tokens: dict[int, float] = {}
        """Raw estimate of each choice, if there are several."""
        self._reported_usage: Usage | None = None
        self._previous_output_tokens = 0
        """Output tokens of earlier servers, whose streams broke."""
        self.has_estimates = False
        self._prompt_reported = False
        self._chunks = 0
        self._calls: set[tuple[int, object]] = set()
        """Tool calls so far: choice and number of each."""
        self.choices_over_grant: dict[int, float] = {}

    def count(self, batch: TextBatch) -> None:
        """Counts one batch of the answer."""
        context, over = self._context, self.choices_over_grant
        self._chunks += batch.chunks
        for part in batch.parts:
            if part.index in over:
                continue
            tokens = estimate(part.text) if part.text else 0.0
            if part.extra:
                tokens += estimate_members(part.extra)
                if calls := part.extra.get("tool_calls"):
                    self._calls.update((part.index, call.get("index")) for call in calls)
            self._estimated_output_tokens += tokens
            choice_tokens = self._estimated_output_tokens
            if self._grant.choices > 1:
                choice_tokens = self._choice_tokens[part.index] = self._choice_tokens.get(part.index, 0.0) + tokens
            if (excess := choice_tokens * self._model.output_ratio.value - self._certain_tokens) > 0:
                over[part.index] = max(0.0, 1.0 - excess / (tokens * self._model.output_ratio.value))
        if self._chunks > self._certain_chunks or len(self._calls) > _MAX_CALLS:
            self._end_all_choices()
        if batch.usage is not None:
            self._reported_usage = batch.usage
            self._apply(batch.usage)
            # What the server counted beside that is about its own part of the answer.
            context.usage_details = None if self._previous_output_tokens else batch.usage.details
            if batch.parts and not batch.whole and batch.usage.completion_tokens > self._remaining_tokens:
                self._end_all_choices()
        elif batch.parts and self._reported_usage is None:
            context.completion_tokens = self._previous_output_tokens + self._estimate_output()

    def restart(self) -> None:
        """Resets the counts: a new attempt starts from the beginning."""
        self._forget_attempt()
        context = self._context
        context.prompt_tokens, context.cached_tokens, context.completion_tokens = self._reserved_prompt_tokens, 0, 0
        context.cache_write_tokens = context.cache_write_1h_tokens = context.reasoning_tokens = 0
        context.usage_details = None

    def resume(self) -> None:
        """Keeps what was counted while another server continues; its repeated prompt is not billed.

        Most servers send each token in a chunk of its own. So without reported usage the chunks are counted, unless the
        text has so many more tokens that a chunk must have several.
        """
        context = self._context
        if self._reported_usage is None:
            estimate = context.completion_tokens - self._previous_output_tokens
            tokens = self._chunks if estimate < _SEVERAL_TOKENS_PER_CHUNK * self._chunks else estimate
            context.completion_tokens = min(self._previous_output_tokens + tokens, self._grant.tokens)
        self._previous_output_tokens = context.completion_tokens
        self.has_estimates = self.has_estimates or self._reported_usage is None
        self._prompt_reported = self._prompt_reported or self._reported_usage is not None
        self._forget_attempt()

    def resume_from(self, prefix: AnswerPrefix) -> None:
        """Counts on where another model broke off; the counts are those of the whole answer."""
        self._previous_output_tokens = self._context.completion_tokens = prefix.tokens
        self.has_estimates = prefix.estimated

    def close(self) -> str:
        """Finishes counting at the end of the answer; updates the estimation ratios.

        Returns:
            What is not credible about the server's counts, for a log message; empty: nothing.
        """
        usage, context = self._reported_usage, self._context
        if usage is None or self.has_estimates:
            context.estimated = True
        if self.choices_over_grant:
            context.completion_tokens = self._previous_output_tokens + self._estimate_output()
            context.estimated = True
            return f"the answer went on after the {self._grant.choice_tokens:,} tokens of each choice that it may have"
        if usage is None:
            return ""
        prompt_is_credible = self._prompt_is_credible(usage)
        output_is_credible = self._output_is_credible(usage)
        if not (prompt_is_credible and output_is_credible):
            context.estimated = True
            return f"it counted {usage.prompt_tokens:,} tokens of prompt and {usage.completion_tokens:,} of answer"
        if not self._previous_output_tokens:
            if self._estimated_prompt is not None:
                self._model.prompt_ratio.learn(self._estimated_prompt, usage.prompt_tokens)
            self._model.output_ratio.learn(self._estimated_output_tokens, usage.completion_tokens)
        return ""

    @property
    def _remaining_tokens(self) -> int:
        """Output tokens that are granted to the current server."""
        return self._grant.tokens - self._previous_output_tokens

    def _apply(self, usage: Usage) -> None:
        """Writes the credible counts of a report into the context, and estimates in place of the others."""
        context = self._context
        if self._prompt_reported:
            pass
        elif self._prompt_is_credible(usage):
            # A continuing server counts the earlier output as prompt.
            context.prompt_tokens = max(1, usage.prompt_tokens - self._previous_output_tokens)
            context.cached_tokens = min(usage.cached_tokens, context.prompt_tokens)
            context.cache_write_tokens = min(usage.cache_write_tokens, context.prompt_tokens - context.cached_tokens)
            context.cache_write_1h_tokens = min(usage.cache_write_1h_tokens, context.cache_write_tokens)
        else:
            context.prompt_tokens, context.cached_tokens = self._reserved_prompt_tokens, 0
            context.cache_write_tokens = context.cache_write_1h_tokens = 0
        is_credible = self._output_is_credible(usage)
        tokens = usage.completion_tokens if is_credible else self._estimate_output()
        context.completion_tokens = self._previous_output_tokens + tokens
        context.reasoning_tokens = min(usage.reasoning_tokens, tokens) if is_credible else 0

    def _prompt_is_credible(self, usage: Usage) -> bool:
        tokens = usage.prompt_tokens - self._previous_output_tokens
        return usage.prompt_tokens >= self._min_prompt_tokens and tokens <= self._max_prompt_tokens

    def _output_is_credible(self, usage: Usage) -> bool:
        tokens = usage.completion_tokens
        return _MIN_COUNTED_SHARE * self._estimated_output_tokens <= tokens <= self._remaining_tokens and (
            tokens > 0 or not self._estimated_output_tokens
        )

    def _estimate_output(self) -> int:
        """Returns the estimated output tokens of the current server, at most as many as were granted."""
        tokens = max(1, round(self._estimated_output_tokens * self._model.output_ratio.value))
        return min(tokens, max(1, self._remaining_tokens))

    def _end_all_choices(self) -> None:
        for index in range(self._grant.choices):
            self.choices_over_grant.setdefault(index, 1.0)

    def _forget_attempt(self) -> None:
        self._estimated_output_tokens, self._reported_usage, self._chunks = 0.0, None, 0
        self._choice_tokens.clear()
        self._calls.clear()
        self.choices_over_grant.clear()
