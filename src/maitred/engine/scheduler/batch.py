"""Running batch: the sequences that hold KV blocks, in prefill or in decode."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from maitred.core.request import WaitCause
from maitred.engine.scheduler.sequence import Sequence


class RunningBatch:
    """Running sequences of the engine, by key.

    Args:
        itl_objective_s: Default inter-token latency objective of sequences without their own.

    Attributes:
        decoding: Sequences in decode, which have to compute only the tokens of their last step (usually one).
        prefilling: Sequences in prefill, which have more tokens to compute.
        context_tokens: Context tokens of the decoding sequences in the last plan.
        promised_blocks: Blocks that the sequences are expected to take in the future. A sequence beyond its expected
            length counts 0.
        skipped: Sequences in prefill that got no tokens in the last plan.
        oldest_skips: Number of the last plans that had nothing for the oldest prefill.
    """

    def __init__(self, itl_objective_s: float | None) -> None:
        self.decoding: dict[int, Sequence] = {}
        self.prefilling: dict[int, Sequence] = {}
        self.context_tokens = 0
        self.promised_blocks = 0
        self.skipped: list[Sequence] = []
        self.oldest_skips = 0
        self._default_s = itl_objective_s
        self._objectives: Counter[float] = Counter()
        """Objective -> number of decoding sequences with it."""
        self._planned_s = 0.0

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self.decoding.values(), self.prefilling.values())

    @property
    def itl_objective_s(self) -> float | None:
        """Smallest objective of the decoding sequences in seconds; None: no sequence has one."""
        return min(self._objectives, default=None)

    @property
    def prompt_tokens_left(self) -> int:
        """Number of prompt tokens that are still to be computed."""
        return sum(max(0, sequence.prompt_tokens - sequence.computed) for sequence in self.prefilling.values())

    def enter(self, sequence: Sequence) -> None:
        """Adds a sequence that was admitted with blocks for its tokens."""
        table = sequence.table
        expected = table.blocks_for(sequence.prompt_tokens + sequence.expected_output)
        self._promise(sequence, expected - len(table.blocks))
        if sequence.pending == 1:
            self._decode(sequence)
        else:
            self.prefilling[sequence.key] = sequence

    def on_sample(self, sequence: Sequence) -> bool:
        """Notes an output token of a sequence; returns whether the sequence now begins to decode."""
        if self.prefilling.pop(sequence.key, None) is None:
            return False
        self._decode(sequence)
        return True

    def grew(self, sequence: Sequence, blocks: int) -> None:
        """Notes that a sequence took this number of further blocks."""
        self._promise(sequence, sequence.promised_blocks - blocks)

    def leave(self, sequence: Sequence) -> bool:
        """Removes a sequence and returns whether it was decoding."""
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
        """Adds the time since the last plan to the waiting times of the sequences that it skipped."""
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
