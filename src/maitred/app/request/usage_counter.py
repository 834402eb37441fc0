"""Counts the usage of an upstream answer: estimated until the server reports it; corrects the estimation ratios.

Tokens are estimated from the text until the server reports its usage, which replaces the estimate. Without a report,
the usage is marked as estimated.
"""

import msgspec

from maitred.core.context import RequestContext
from maitred.core.inference import AnswerPrefix
from maitred.core.request import Usage
from maitred.core.text_replica import TextBatch
from maitred.routing.catalog import TextModel
from maitred.text.estimate import estimate


class UpstreamUsageCounter:
    """Usage of one upstream answer, counted or estimated, written into its request context.

    Args:
        model: Has the estimation ratios to update.
        context: Request context with the reserved prompt tokens; gets the usage.
        estimated_prompt: Raw estimate of the prompt tokens; None: they were counted.

    Attributes:
        has_estimates: Whether the output tokens of an earlier server are estimates.
    """

    def __init__(self, model: TextModel, context: RequestContext, estimated_prompt: float | None) -> None:
        self._model = model
        self._context = context
        self._estimated_prompt = estimated_prompt
        self._reserved_prompt_tokens = context.prompt_tokens
        self._estimated_output_tokens = 0.0
        self._reported_usage: Usage | None = None
        self._previous_output_tokens = 0
        """Output tokens of earlier servers, whose streams broke."""
        self.has_estimates = False
        self._prompt_reported = False
        self._chunks = 0

    def count(self, batch: TextBatch) -> None:
        """Counts one batch of the answer."""
        context = self._context
        self._chunks += batch.chunks
        for part in batch.parts:
            if part.text:
                self._estimated_output_tokens += estimate(part.text)
            if part.extra:
                self._estimated_output_tokens += estimate(msgspec.json.encode(part.extra).decode())
        if batch.usage is not None:
            self._reported_usage = usage = batch.usage
            if not self._prompt_reported:
                # A continuing server counts the earlier output as prompt.
                context.prompt_tokens = max(1, usage.prompt_tokens - self._previous_output_tokens)
                context.cached_tokens = min(usage.cached_tokens, context.prompt_tokens)
            context.completion_tokens = self._previous_output_tokens + usage.completion_tokens
        elif batch.parts and self._reported_usage is None:
            ratio = self._model.output_ratio.value
            context.completion_tokens = self._previous_output_tokens + max(
                1, round(self._estimated_output_tokens * ratio)
            )

    def restart(self) -> None:
        """Resets the counts: a new attempt starts from the beginning."""
        self._estimated_output_tokens, self._reported_usage, self._chunks = 0.0, None, 0
        context = self._context
        context.prompt_tokens, context.cached_tokens, context.completion_tokens = self._reserved_prompt_tokens, 0, 0

    def resume(self) -> None:
        """Keeps what was counted while another server continues; its repeated prompt is not billed.

        Without reported usage, the number of chunks is a lower bound of the tokens.
        """
        context = self._context
        if self._reported_usage is None:
            context.completion_tokens = max(context.completion_tokens, self._previous_output_tokens + self._chunks)
        self._previous_output_tokens = context.completion_tokens
        self.has_estimates = self.has_estimates or self._reported_usage is None
        self._prompt_reported = self._prompt_reported or self._reported_usage is not None
        self._estimated_output_tokens, self._reported_usage, self._chunks = 0.0, None, 0

    def resume_from(self, prefix: AnswerPrefix) -> None:
        """Counts on where another model broke off; the counts are those of the whole answer."""
        self._previous_output_tokens = self._context.completion_tokens = prefix.tokens
        self.has_estimates = prefix.estimated

    def close(self) -> None:
        """Finishes counting at the end of the answer; updates the estimation ratios."""
        usage = self._reported_usage
        if usage is None or self.has_estimates:
            self._context.estimated = True
        if usage is None or self._previous_output_tokens:
            return
        if self._estimated_prompt is not None:
            self._model.prompt_ratio.learn(self._estimated_prompt, usage.prompt_tokens)
        self._model.output_ratio.learn(self._estimated_output_tokens, usage.completion_tokens)
