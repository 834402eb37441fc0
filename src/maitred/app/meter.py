"""Counts an answer of a server that counts by itself, and learns from the difference.

Until the server says what it has counted, tokens are estimated from the text; what it says replaces the estimate. If it
never says, the estimate stands, and the usage is marked as one.
"""

import msgspec

from maitred.core.answer import Tally
from maitred.core.relay import Batch
from maitred.core.request import Usage
from maitred.routing.catalog import TextModel
from maitred.text.estimate import estimate


class Meter:
    """Of one answer. Writes into its tally.

    Args:
        model: Learns the ratios.
        tally: Has the prompt's tokens as they were reserved.
        estimated_prompt: The same by the rule alone; None: they were counted, and there is nothing to learn.
    """

    def __init__(self, model: TextModel, tally: Tally, estimated_prompt: float | None) -> None:
        self._model = model
        self._tally = tally
        self._estimated_prompt = estimated_prompt
        self._reserved_prompt = tally.prompt_tokens
        self._estimated_output = 0.0
        self._counted: Usage | None = None

    def take(self, batch: Batch) -> None:
        """Something came."""
        tally = self._tally
        for part in batch.parts:
            self._estimated_output += estimate(part.text)
            if part.extra:
                self._estimated_output += estimate(msgspec.json.encode(part.extra).decode())
        if batch.usage is not None:
            self._counted = usage = batch.usage
            tally.prompt_tokens, tally.cached_tokens = usage.prompt_tokens, usage.cached_tokens
            tally.completion_tokens = usage.completion_tokens
        elif batch.parts and self._counted is None:
            ratio = self._model.output_ratio.value
            tally.completion_tokens = max(1, round(self._estimated_output * ratio))

    def begin_anew(self) -> None:
        """What came is of no use: another answer begins."""
        self._estimated_output, self._counted = 0.0, None
        tally = self._tally
        tally.prompt_tokens, tally.cached_tokens, tally.completion_tokens = self._reserved_prompt, 0, 0

    def close(self) -> None:
        """The answer is whole: what was counted is all there is to count."""
        usage = self._counted
        if usage is None:
            self._tally.estimated = True
            return
        if self._estimated_prompt is not None:
            self._model.prompt_ratio.learn(self._estimated_prompt, usage.prompt_tokens)
        self._model.output_ratio.learn(self._estimated_output, usage.completion_tokens)
