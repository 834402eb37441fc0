"""The sequences that wait for admission: the line that orders them, and what they will need."""

from maitred.core.service import ServiceWeights
from maitred.engine.scheduler.sequence import Sequence
from maitred.fairness.line import Entry, Line


class WaitingRoom:
    """A line of sequences.

    Args:
        line: Their order.
        weights: Service per token, to predict what a sequence will cost.
        block_tokens: Tokens per block.
        by_prefix: Whether the line wants to know who shares a prefix.

    Attributes:
        blocks: KV blocks that they are expected to take, prefixes that they may find in the cache included.
        prompt_tokens: Of all of them.
    """

    def __init__(self, line: Line[Sequence], weights: ServiceWeights, *, block_tokens: int, by_prefix: bool) -> None:
        self.blocks = 0
        self.prompt_tokens = 0
        self._line = line
        self._weights = weights
        self._block_tokens = block_tokens
        self._by_prefix = by_prefix

    def __len__(self) -> int:
        return len(self._line)

    def enter(self, sequence: Sequence, now_s: float) -> None:
        """A sequence joins the line: a new one, or one that was paused, by the age it has."""
        prompt, scope = sequence.request.prompt, sequence.request.cache_scope
        sequence.entry = Entry(
            sequence,
            sequence.account.flow,
            arrived_s=sequence.arrived_s,
            service=self._weights.of(sequence.prompt_tokens, 0, sequence.expected_output),
            deadline_s=sequence.deadline_s,
            locality=hash((scope, *prompt[: self._block_tokens])) if self._by_prefix else None,
        )
        self._line.add(sequence.entry, now_s)
        self._count(sequence, 1)

    def put_back(self, sequence: Sequence, now_s: float) -> None:
        """A sequence that was taken waits again."""
        self._line.put_back(sequence.entry, now_s)
        self._count(sequence, 1)

    def head(self, now_s: float) -> Sequence | None:
        """Whose turn it is."""
        entry = self._line.head(now_s)
        return None if entry is None else entry.value

    def take(self, sequence: Sequence, now_s: float) -> None:
        """A sequence is admitted."""
        self._line.take(sequence.entry, now_s)
        self._count(sequence, -1)

    def leave(self, sequence: Sequence) -> None:
        """A sequence waits no more, and was not admitted."""
        self._line.remove(sequence.entry)
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, sign: int) -> None:
        expected = sequence.prompt_tokens + sequence.expected_output
        self.blocks += sign * -(-expected // self._block_tokens)
        self.prompt_tokens += sign * sequence.prompt_tokens
