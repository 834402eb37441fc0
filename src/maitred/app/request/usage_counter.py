"""Counts an answer of a server that counts by itself, and learns from the difference.

Until the server says what it has counted, tokens are estimated from the text; what it says replaces the estimate. If it
never says, the estimate stands, and the usage is marked as one.
"""

import msgspec

from maitred.core.context import RequestContext
from maitred.core.request import Usage
from maitred.core.text_replica import TextBatch
from maitred.routing.catalog import TextModel
from maitred.text.estimate import estimate


class UpstreamUsageCounter:
    """Usage of one upstream answer, counted or estimated, written into its request context.

    Args:
        model: Learns the ratios.
        context: Has the prompt's tokens as they were reserved.
        estimated_prompt: The same by the rule alone; None: they were counted, and there is nothing to learn.
    """

    def __init__(self, model: TextModel, context: RequestContext, estimated_prompt: float | None) -> None:
        self._model = model
        self._context = context
        self._estimated_prompt = estimated_prompt
        self._reserved_prompt = context.prompt_tokens
        self._estimated_output = 0.0
        self._counted: Usage | None = None
        self._before = 0
        """Tokens of the answer that came from servers which have broken off since."""
        self._guessed = False
        """Whether some of these were not counted."""
        self._prompt_counted = False
        self._chunks = 0

    def count(self, batch: TextBatch) -> None:
        """Counts one batch of the answer."""
        context = self._context
        self._chunks += batch.chunks
        for part in batch.parts:
            if part.text:
                self._estimated_output += estimate(part.text)
            if part.extra:
                self._estimated_output += estimate(msgspec.json.encode(part.extra).decode())
        if batch.usage is not None:
            self._counted = usage = batch.usage
            if not self._prompt_counted:
                # To who goes on, what came before is a part of the prompt.
                context.prompt_tokens = max(1, usage.prompt_tokens - self._before)
                context.cached_tokens = min(usage.cached_tokens, context.prompt_tokens)
            context.completion_tokens = self._before + usage.completion_tokens
        elif batch.parts and self._counted is None:
            ratio = self._model.output_ratio.value
            context.completion_tokens = self._before + max(1, round(self._estimated_output * ratio))

    def restart(self) -> None:
        """Drops what was counted: another answer begins."""
        self._estimated_output, self._counted, self._chunks = 0.0, None, 0
        context = self._context
        context.prompt_tokens, context.cached_tokens, context.completion_tokens = self._reserved_prompt, 0, 0

    def resume(self) -> None:
        """Keeps what was counted while another server continues; its repeated prompt is not billed.

        Where nobody has counted, there were at least as many tokens as pieces of text.
        """
        context = self._context
        if self._counted is None:
            context.completion_tokens = max(context.completion_tokens, self._before + self._chunks)
        self._before = context.completion_tokens
        self._guessed = self._guessed or self._counted is None
        self._prompt_counted = self._prompt_counted or self._counted is not None
        self._estimated_output, self._counted, self._chunks = 0.0, None, 0

    def close(self) -> None:
        """The answer is whole: what was counted is all there is to count."""
        usage = self._counted
        if usage is None or self._guessed:
            self._context.estimated = True
        if usage is None or self._before:
            return
        if self._estimated_prompt is not None:
            self._model.prompt_ratio.learn(self._estimated_prompt, usage.prompt_tokens)
        self._model.output_ratio.learn(self._estimated_output, usage.completion_tokens)
