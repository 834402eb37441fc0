"""The sequences that hold blocks: those that decode, and those whose prompts are under way."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from maitred.core.request import WaitCause
from maitred.engine.scheduler.sequence import Sequence


class Batch:
    """Running sequences by key.

    Args:
        itl_objective_s: Of those that do not bring one of their own.

    Attributes:
        decoding: Have one token to compute.
        prefilling: Have more.
        context_tokens: Of those that decode, as of the last plan.
        skipped: Prompts under way that the last plan had no tokens for.
    """

    def __init__(self, itl_objective_s: float | None) -> None:
        self.decoding: dict[int, Sequence] = {}
        self.prefilling: dict[int, Sequence] = {}
        self.context_tokens = 0
        self.skipped: list[Sequence] = []
        self._default_s = itl_objective_s
        self._objectives: Counter[float] = Counter()
        """Of those that decode."""
        self._planned_s = 0.0

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self.decoding.values(), self.prefilling.values())

    @property
    def itl_objective_s(self) -> float | None:
        """The tightest of those that decode; None: nobody minds."""
        return min(self._objectives, default=None)

    @property
    def prompt_tokens_left(self) -> int:
        """Prompt tokens still to be computed."""
        return sum(max(0, sequence.prompt_tokens - sequence.computed) for sequence in self.prefilling.values())

    def promised_blocks(self, block_tokens: int) -> int:
        """Blocks that the sequences are still expected to take."""
        promised = 0
        for sequences in (self.decoding, self.prefilling):
            for sequence in sequences.values():
                left = sequence.prompt_tokens + sequence.expected_output - sequence.table.capacity_tokens
                if left > 0:
                    promised += -(-left // block_tokens)
        return promised

    def enter(self, sequence: Sequence) -> None:
        """A sequence was admitted."""
        if sequence.pending == 1:
            self._decode(sequence)
        else:
            self.prefilling[sequence.key] = sequence

    def computed(self, sequence: Sequence) -> None:
        """A part of a prompt was computed; if it was the last one, the sequence decodes from now on."""
        if sequence.pending == 1 and self.prefilling.pop(sequence.key, None) is not None:
            self._decode(sequence)

    def leave(self, sequence: Sequence) -> bool:
        """Takes a sequence out; False if it is not in."""
        if self.decoding.pop(sequence.key, None) is not None:
            objective_s = self._objective(sequence)
            if objective_s is not None:
                self._objectives[objective_s] -= 1
                if not self._objectives[objective_s]:
                    del self._objectives[objective_s]
            return True
        return self.prefilling.pop(sequence.key, None) is not None

    def count_skipped(self, now_s: float) -> None:
        """The time since the last plan was lost for those whom it had skipped."""
        cause = WaitCause.PREFILL_BUDGET.value
        for sequence in self.skipped:
            if sequence.key in self.prefilling:
                sequence.waited_s[cause] = sequence.waited_s.get(cause, 0.0) + now_s - self._planned_s
        self._planned_s = now_s

    def _decode(self, sequence: Sequence) -> None:
        self.decoding[sequence.key] = sequence
        objective_s = self._objective(sequence)
        if objective_s is not None:
            self._objectives[objective_s] += 1

    def _objective(self, sequence: Sequence) -> float | None:
        return self._default_s if sequence.itl_objective_s is None else sequence.itl_objective_s
