"""Counts the usage of an upstream answer: estimated until the server reports it; corrects the estimation ratios.

Tokens are estimated from the text until the server reports its usage, which replaces the estimate. Without a report,
the usage is marked as estimated.

A report is checked against what is known of the request. A count of the prompt must fit what was sent, and a count of
the answer what was granted and what was seen: one that does not is replaced by the estimate, which is marked. The
answer itself is checked, too: a choice with certainly more tokens than were granted is over its grant, because its
server ignores `max_tokens`, and ends there.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec
from msgspec.structs import replace

from maitred.core.context import RequestContext
from maitred.core.inference import AnswerPrefix, TextDelta
from maitred.core.request import Usage
from maitred.core.text_replica import TextBatch
from maitred.routing.catalog import TextModel
from maitred.text.estimate import estimate, estimate_members
from maitred.text.tokenizer import Tokenizer
from maitred.wire.openai.requests import split_prompts
from maitred.wire.openai.responses import TEXT_FIELDS
from maitred.wire.responses.answer import begins_item, is_response_event, tells_server_call

_ADDED_PROMPT_TOKENS = 16_384
"""Most tokens that a server may add to a prompt: its template, instructions, or documents that it retrieves."""
_MAX_BYTES_PER_TOKEN = 128
"""Most bytes of a token in common vocabularies; their longest tokens are runs of spaces."""
_ASCII_BYTES_PER_ESTIMATED_TOKEN = 4
_MIN_COUNTED_SHARE = _ASCII_BYTES_PER_ESTIMATED_TOKEN / _MAX_BYTES_PER_TOKEN
"""Smallest credible quotient of a count and the raw estimate."""
_CERTAIN_FACTOR = 2.0
"""An answer certainly has more tokens than were granted if its estimate is this many times as high. The estimate of a
text is rarely wrong by this factor once the ratio is learnt."""
_CERTAIN_FACTOR_OF_LEAST = 1.5
"""The same of the lowest quotient of a count and its estimate that was seen."""
_MAX_CERTAIN_RATIO = 0.6
"""Highest number of tokens that a text certainly has for each estimated one: thoughts that are not shown are counted as
well, so what was learnt may be too high for an answer that has none."""
_ODD_TOKENS = 16
"""What an answer may have beyond its grant by any measure: a short text says little."""
_ODD_SHARE_OF_TOKENIZER = 0.02
"""Share of the grant that a text may have beyond it by the model's own tokenizer, which cuts it in one way of many."""
_MOST_TOKENIZED = 16_384
"""Longest answer whose tokens are counted by the tokenizer, which holds up everything else."""
_MEDIA_FIELDS = frozenset(
    {"web_search_options", "plugins", "search_parameters", "documents", "data_sources", "extra_body"}
)
"""Fields of a request that make its server read more than was sent."""
_MAX_CALLS = 1_024
"""Most tool calls of an answer, of all choices together."""
_MAX_ENTRIES = 16_384
"""Most entries of lists, such as pictures and annotations, and of content blocks in an answer."""
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
    is_sent: bool = True
    """Whether the server was given the limit; without one it may fill its window, which it knows better."""

    @property
    def tokens(self) -> int:
        """Returns the output tokens of all choices together."""
        return self.choice_tokens * self.choices


NO_FIELDS: Mapping[str, Any] = {}


class UpstreamUsageCounter:
    """Usage of one upstream answer, counted or estimated, written into its request context.

    Args:
        model: Has the estimation ratios to update.
        context: Request context with the reserved prompt tokens; gets the usage.
        estimated_prompt: Raw estimate of the prompt tokens; None: they were counted.
        grant: The granted output tokens.
        fields: Fields of the request that the servers get.

    Attributes:
        choices_over_grant: Choices that certainly have more tokens than were granted, each with the share of its delta
            at the grant that is not over it. Later deltas are not counted.
        has_estimates: Whether the output tokens of an earlier server are estimates.
    """

    def __init__(
        self,
        model: TextModel,
        context: RequestContext,
        estimated_prompt: float | None,
        grant: OutputGrant,
        fields: Mapping[str, Any] = NO_FIELDS,
    ) -> None:
        self._model = model
        self._context = context
        self._estimated_prompt = estimated_prompt
        self._grant = grant
        self._granted_tokens = grant.tokens
        self._reserved_prompt_tokens = context.prompt_tokens
        self._fields = fields
        self._tokenizer = model.tokenizer if grant.is_sent and grant.choice_tokens <= _MOST_TOKENIZED else None
        self._entries = 0
        self._certain_tokens = 0.0
        """Fewest tokens that a choice over its grant can have."""
        self._written: dict[int, list[str]] = {}
        """Text of each choice, if it can be tokenized."""
        self._tokenized_at: dict[int, float] = {}
        """Estimate of each choice from which on it is tokenized again."""
        self._estimated_output_tokens = 0.0
        self._choice_tokens: dict[int, float] = {}
        """Raw estimate of each choice, if there are several."""
        self._reported_usage: Usage | None = None
        self._prompt_is_credible = False
        """Whether its count of the prompt is credible."""
        self._previous_output_tokens = 0
        """Output tokens of earlier servers, whose streams broke."""
        self.has_estimates = False
        self._prompt_reported = False
        self._has_server_tools = False
        """Whether tools have run at the server, whose results it read."""
        self._chunks = 0
        self._calls: set[tuple[int, object]] = set()
        """Tool calls so far: choice and number of each."""
        self.choices_over_grant: dict[int, float] = {}
        self._echoes = fields.get("echo") is True and "prompt" in fields
        self._echoed_left: dict[int, int] = {}
        """Characters of the prompt that each choice has still to repeat."""
        self._last_parts: dict[int, TextDelta | None] = {}
        """Delta with which each choice was over its grant; None: it was cut. A choice that ended otherwise has none."""

    def count(self, batch: TextBatch) -> None:
        """Counts one batch of the answer."""
        context, over = self._context, self.choices_over_grant
        self._chunks += batch.chunks
        for part in batch.parts:
            if over and part.index in over:
                continue
            answer = self._without_prompt(part) if self._echoes else part
            tokens = estimate(answer.text) if answer.text else 0.0
            if part.block is not None:
                self._note_block(part.block)
            if part.extra:
                tokens += estimate_members(part.extra)
                self._entries += sum(len(value) for value in part.extra.values() if value.__class__ is list)
                if calls := part.extra.get("tool_calls"):
                    self._entries -= len(calls)
                    self._calls.update((part.index, call.get("index")) for call in calls)
            if not tokens:
                continue
            self._estimated_output_tokens += tokens
            choice_tokens = self._estimated_output_tokens
            if self._grant.choices > 1:
                choice_tokens = self._choice_tokens[part.index] = self._choice_tokens.get(part.index, 0.0) + tokens
            # A text certainly has no more tokens than are estimated, so below the grant only a tokenizer says more.
            if choice_tokens > self._grant.choice_tokens or self._tokenizer is not None:
                self._check_grant(part, answer, choice_tokens, tokens)
        # A chunk certainly has one token at most, so fewer chunks than granted tokens say nothing.
        most_chunks = self._granted_tokens + (self._grant.choices if self._echoes else 0)
        has_surplus = self._chunks > most_chunks and self._certain_by_chunks > most_chunks + _ODD_TOKENS
        if has_surplus or len(self._calls) > _MAX_CALLS or self._entries > _MAX_ENTRIES:
            self._end_all_choices()
        if batch.usage is not None:
            self._reported_usage = batch.usage
            self._apply(batch.usage)
            # What the server counted beside that is about its own part of the answer.
            context.usage_details = None if self._previous_output_tokens else batch.usage.details
            if batch.parts and not batch.whole and batch.usage.completion_tokens > self._most_counted_tokens:
                self._end_all_choices()
        elif batch.parts and self._reported_usage is None:
            context.completion_tokens = self._previous_output_tokens + self._estimate_output()

    def _note_block(self, event: Mapping[str, Any]) -> None:
        """Notes an event of the client's own API."""
        if is_response_event(event):
            self._has_server_tools = self._has_server_tools or tells_server_call(event)
            self._entries += begins_item(event)
        else:
            self._has_server_tools = True
            self._entries += event.get("type") == "content_block_start"

    def cut(self, part: TextDelta) -> TextDelta:
        """Returns what is not over its grant of a delta in the last batch of a choice.

        What came before the choice was over its grant stays, and nothing of what came behind it does. Of all of them
        too many calls and entries are left out.
        """
        index = part.index
        last = self._last_parts.get(index, part)
        if last is None:
            return TextDelta(index, "", part.finish)
        share = 1.0
        if part is last:
            share = self.choices_over_grant[index]
            if index in self._last_parts:
                self._last_parts[index] = None
        extra: dict[str, Any] = {}
        for name, value in (part.extra or {}).items():
            if name == "tool_calls":
                extra[name] = [call for call in value if (call.get("index") or 0) < _MAX_CALLS]
            elif name in TEXT_FIELDS and isinstance(value, str):
                extra[name] = value[: int(len(value) * share)]
            else:
                extra[name] = value[:_MAX_ENTRIES] if value.__class__ is list else value
        scores = part.scores and part.scores[: int(len(part.scores) * share)]
        return replace(part, text=part.text[: int(len(part.text) * share)], scores=scores, extra=extra or None)

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
            context.completion_tokens = min(self._previous_output_tokens + tokens, self._granted_tokens)
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
            certain = min(int(max(self._certain_tokens, self._certain_by_chunks)), self._remaining_tokens)
            context.completion_tokens = self._previous_output_tokens + max(certain, self._estimate_output())
            context.estimated = True
            return f"the answer went on after the {self._grant.choice_tokens:,} tokens of each choice that it may have"
        if usage is None:
            return ""
        if not (self._prompt_is_credible and self._is_credible_output(usage.completion_tokens)):
            context.estimated = True
            return f"it counted {usage.prompt_tokens:,} tokens of prompt and {usage.completion_tokens:,} of answer"
        if not self._previous_output_tokens:
            if self._estimated_prompt is not None and not self._reads_more:
                self._model.prompt_ratio.learn(self._estimated_prompt, usage.prompt_tokens)
            self._model.output_ratio.learn(self._estimated_output_tokens, usage.completion_tokens)
            if not usage.reasoning_tokens:  # thoughts that are not shown have no text
                self._model.least_ratio.learn(self._estimated_output_tokens, usage.completion_tokens)
            if not self._calls:
                self._model.least_per_chunk.learn(self._chunks, usage.completion_tokens)
        return ""

    def _without_prompt(self, part: TextDelta) -> TextDelta:
        """Returns a delta without the prompt that its choice begins with, which is no output.

        How long the text of a prompt of token ids is, is not known. Servers send it in the first delta.
        """
        left = self._echoed_left.get(part.index)
        if left is None:
            prompts = split_prompts(self._fields["prompt"])
            prompt = prompts[part.index // max(1, self._grant.choices // len(prompts))]
            left = len(prompt) if isinstance(prompt, str) else len(part.text)
        self._echoed_left[part.index] = max(0, left - len(part.text))
        return replace(part, text=part.text[left:])

    def _check_grant(self, part: TextDelta, answer: TextDelta, choice_tokens: float, tokens: float) -> None:
        """Ends a choice that certainly has more tokens than were granted.

        Args:
            part: Its last delta.
            answer: The same without an echoed prompt.
            choice_tokens: Estimated tokens of the choice.
            tokens: Estimated tokens of the delta.
        """
        ratio = self._certain_ratio
        if self._tokenizer is not None:
            ratio = max(ratio, self._tokenize(self._tokenizer, answer, choice_tokens))
        self._certain_tokens = max(self._certain_tokens, choice_tokens * ratio)
        if (excess := choice_tokens * ratio - self._grant.choice_tokens - _ODD_TOKENS) > 0:
            self.choices_over_grant[part.index] = max(0.0, 1.0 - excess / (tokens * ratio))
            self._last_parts[part.index] = part

    @property
    def _certain_ratio(self) -> float:
        """Tokens that a choice certainly has for each estimated one, at most one."""
        model = self._model
        least_ratio = model.least_ratio.value / _CERTAIN_FACTOR_OF_LEAST if self._grant.is_sent else 0.0
        return min(max(model.output_ratio.value / _CERTAIN_FACTOR, least_ratio), _MAX_CERTAIN_RATIO)

    @property
    def _certain_by_chunks(self) -> float:
        """Tokens that the answer certainly has by the number of its chunks."""
        # A parser of tool calls makes several chunks of one token.
        is_token = not self._calls and self._grant.is_sent and self._model.least_per_chunk.value >= 1.0
        return self._chunks * (1.0 if is_token else 1 / _MAX_CHUNKS_PER_TOKEN)

    def _tokenize(self, tokenizer: Tokenizer, part: TextDelta, choice_tokens: float) -> float:
        """Returns the tokens of a choice for each estimated one, by the model's tokenizer; 0: it was not asked.

        It is asked when half of what was left at the last time may have been written.
        """
        written = self._written.setdefault(part.index, [])
        written.append(part.text)
        extra = part.extra or {}
        written += [extra[name] for name in ("reasoning_content", "refusal") if isinstance(extra.get(name), str)]
        granted = self._grant.choice_tokens
        if choice_tokens * self._model.output_ratio.value < self._tokenized_at.get(part.index, granted / 2):
            return 0.0
        text = "".join(written)
        tokens = len(tokenizer.encode(text, add_special_tokens=False))
        self._written[part.index] = [text]
        left = max(_ODD_TOKENS, (granted - tokens) / 2)
        self._tokenized_at[part.index] = choice_tokens * self._model.output_ratio.value + left
        return (tokens - _ODD_SHARE_OF_TOKENIZER * granted) / choice_tokens

    @property
    def _remaining_tokens(self) -> int:
        """Output tokens that are granted to the current server."""
        return self._granted_tokens - self._previous_output_tokens

    @property
    def _most_counted_tokens(self) -> int:
        """Most output tokens that the current server can have counted.

        vLLM counts a token of each choice that it has computed and not shown if no output was asked for.
        """
        return self._remaining_tokens if self._granted_tokens else self._grant.choices

    def _apply(self, usage: Usage) -> None:
        """Writes the credible counts of a report into the context, and estimates in place of the others."""
        context = self._context
        self._prompt_is_credible = self._is_credible_prompt(usage.prompt_tokens)
        if self._prompt_reported:
            pass
        elif self._prompt_is_credible:
            # A continuing server counts the earlier output as prompt.
            context.prompt_tokens = max(1, usage.prompt_tokens - self._previous_output_tokens)
            context.cached_tokens = context.cache_write_tokens = context.cache_write_1h_tokens = 0
            if usage.cached_tokens or usage.cache_write_tokens:
                rest = context.prompt_tokens
                context.cached_tokens = min(usage.cached_tokens, rest)
                context.cache_write_tokens = min(usage.cache_write_tokens, rest - context.cached_tokens)
                context.cache_write_1h_tokens = min(usage.cache_write_1h_tokens, context.cache_write_tokens)
        else:
            context.prompt_tokens, context.cached_tokens = self._reserved_prompt_tokens, 0
            context.cache_write_tokens = context.cache_write_1h_tokens = 0
        is_credible = self._is_credible_output(usage.completion_tokens)
        tokens = usage.completion_tokens if is_credible else self._estimate_output()
        if not self._granted_tokens:
            tokens = 0
        context.completion_tokens = self._previous_output_tokens + tokens
        context.reasoning_tokens = min(usage.reasoning_tokens, tokens) if is_credible else 0

    def _is_credible_prompt(self, counted: int) -> bool:
        raw_prompt = self._reserved_prompt_tokens if self._estimated_prompt is None else self._estimated_prompt
        if counted < 1 or counted < _MIN_COUNTED_SHARE * raw_prompt:
            return False
        tokens = counted - self._previous_output_tokens
        if tokens > self._grant.max_prompt_tokens:
            return False
        # A token has at least one byte, and an estimated token at most four.
        most_tokens = _ASCII_BYTES_PER_ESTIMATED_TOKEN * raw_prompt + _ADDED_PROMPT_TOKENS
        return tokens <= most_tokens or tokens <= self._most_prompt_tokens

    @property
    def _most_prompt_tokens(self) -> int:
        """Most tokens that the servers can have read: one for each byte of the request, and what they add.

        Of pictures, sound and what a server looks up, only the window says how much it is.
        """
        if self._reads_more:
            return self._grant.max_prompt_tokens
        return min(self._grant.max_prompt_tokens, self._sent_bytes + _ADDED_PROMPT_TOKENS)

    @cached_property
    def _sent_bytes(self) -> int:
        """Bytes of the request."""
        return len(msgspec.json.encode(self._fields))

    @property
    def _reads_more(self) -> bool:
        """Whether the servers read more than the text of the request."""
        return self._has_server_tools or self._has_media

    @property
    def _has_media(self) -> bool:
        """Whether the request has pictures or sound, or asks for what is to be looked up."""
        if not _MEDIA_FIELDS.isdisjoint(self._fields):
            return True
        for message in self._fields.get("messages", ()):
            content = message.get("content")
            if content.__class__ is list and any(part.get("type") != "text" for part in content):
                return True
        tools = self._fields.get("tools")
        return isinstance(tools, list) and any(
            isinstance(tool, dict) and tool.get("type") not in ("function", "custom", None) for tool in tools
        )

    def _is_credible_output(self, counted: int) -> bool:
        return _MIN_COUNTED_SHARE * self._estimated_output_tokens <= counted <= self._most_counted_tokens and (
            counted > 0 or not self._estimated_output_tokens
        )

    def _estimate_output(self) -> int:
        """Returns the estimated output tokens of the current server, at most as many as were granted."""
        if not self._granted_tokens:
            return 0
        tokens = max(1, round(self._estimated_output_tokens * self._model.output_ratio.value))
        return min(tokens, max(1, self._remaining_tokens))

    def _end_all_choices(self) -> None:
        for index in range(self._grant.choices):
            self.choices_over_grant.setdefault(index, 1.0)

    def _forget_attempt(self) -> None:
        self._estimated_output_tokens, self._reported_usage, self._chunks = 0.0, None, 0
        self._certain_tokens, self._entries = 0.0, 0
        self._choice_tokens.clear()
        self._written.clear()
        self._tokenized_at.clear()
        self._calls.clear()
        self.choices_over_grant.clear()
        self._last_parts.clear()
        self._echoed_left.clear()
