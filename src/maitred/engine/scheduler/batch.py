"""The sequences that hold blocks: those that decode, and those whose prompts are under way."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from maitred.core.request import WaitCause
from maitred.engine.scheduler.sequence import Sequence


class RunningBatch:
    """Running sequences by key.

    Args:
        itl_objective_s: Of those that do not bring one of their own.

    Attributes:
        decoding: Have nothing to compute but what their last step has added: one token, as a rule.
        prefilling: Have more.
        context_tokens: Of those that decode, as of the last plan.
        promised_blocks: That the sequences are still expected to take. Who got further than was expected takes what it
            needs, and promises nothing.
        skipped: Prompts under way that the last plan had no tokens for.
    """

    def __init__(self, itl_objective_s: float | None) -> None:
        self.decoding: dict[int, Sequence] = {}
        self.prefilling: dict[int, Sequence] = {}
        self.context_tokens = 0
        self.promised_blocks = 0
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

    def enter(self, sequence: Sequence) -> None:
        """A sequence was admitted, with blocks for what it has."""
        table = sequence.table
        expected = table.blocks_for(sequence.prompt_tokens + sequence.expected_output)
        self._promise(sequence, expected - len(table.blocks))
        if sequence.pending == 1:
            self._decode(sequence)
        else:
            self.prefilling[sequence.key] = sequence

    def on_sample(self, sequence: Sequence) -> bool:
        """A sequence got a token of its answer; if it did not decode before, it does from now on, which is told."""
        if self.prefilling.pop(sequence.key, None) is None:
            return False
        self._decode(sequence)
        return True

    def grew(self, sequence: Sequence, blocks: int) -> None:
        """A sequence took so many blocks more."""
        self._promise(sequence, sequence.promised_blocks - blocks)

    def leave(self, sequence: Sequence) -> bool:
        """Takes a sequence out; tells whether it decoded."""
        self._promise(sequence, 0)
        if self.decoding.pop(sequence.key, None) is not None:
            objective_s = self._objective(sequence)
            if objective_s is not None:
                self._objectives[objective_s] -= 1
                if not self._objectives[objective_s]:
                    del self._objectives[objective_s]
            return True
        self.prefilling.pop(sequence.key, None)
        return False

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

    def _promise(self, sequence: Sequence, blocks: int) -> None:
        self.promised_blocks -= sequence.promised_blocks
        sequence.promised_blocks = max(0, blocks)
        self.promised_blocks += sequence.promised_blocks

    def _objective(self, sequence: Sequence) -> float | None:
        return self._default_s if sequence.itl_objective_s is None else sequence.itl_objective_s
