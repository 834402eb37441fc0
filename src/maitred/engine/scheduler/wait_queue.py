"""The sequences that wait for admission: the line that orders them, and what they will need."""

from maitred.core.flow import ServiceWeights
from maitred.engine.scheduler.kv_shares import KVShares
from maitred.engine.scheduler.sequence import FlowCharge, Sequence
from maitred.fairness.fair_queue import FairQueue, QueueEntry


class WaitQueue:
    """A line of sequences, and beside it those whose tenants hold all of the KV cache that they may.

    The latter must not keep others from their turn, so they stand aside until something of their tenants has ended.

    Args:
        fair_queue: Their order.
        weights: Service per token, to predict what a sequence will cost.
        residency: Learns who waits, and says who may go on.
        block_tokens: Tokens per block.
        by_prefix: Whether the line wants to know who shares a prefix.

    Attributes:
        blocks: KV blocks that they are expected to take, prefixes that they may find in the cache included.
        prompt_tokens: Of all of them.
    """

    def __init__(
        self,
        fair_queue: FairQueue[Sequence],
        weights: ServiceWeights,
        residency: KVShares,
        *,
        block_tokens: int,
        by_prefix: bool,
    ) -> None:
        self.blocks = 0
        self.prompt_tokens = 0
        self._line = fair_queue
        self._weights = weights
        self._residency = residency
        self._block_tokens = block_tokens
        self._by_prefix = by_prefix
        self._aside: dict[FlowCharge, dict[int, Sequence]] = {}
        """By flow, in the order in which they would have been admitted."""
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def enter(self, sequence: Sequence, now_s: float) -> None:
        """A sequence joins the line: a new one, or one that comes back, by the age it has."""
        prompt, scope = sequence.request.prompt, sequence.request.cache_scope
        sequence.entry = QueueEntry(
            sequence,
            sequence.account.flow,
            arrived_s=sequence.arrived_s,
            service=self._weights.service(sequence.prompt_tokens, 0, sequence.expected_output),
            deadline_s=sequence.deadline_s,
            locality=hash((scope, *prompt[: self._block_tokens])) if self._by_prefix else None,
        )
        self._line.add(sequence.entry, now_s)
        self._count(sequence, 1)

    def put_back(self, sequence: Sequence, now_s: float) -> None:
        """A sequence that was taken waits again."""
        self._line.requeue(sequence.entry, now_s)
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
        own = self._aside.get(sequence.account)
        if own is not None and own.pop(sequence.key, None) is not None:
            if not own:
                del self._aside[sequence.account]
        else:
            self._line.remove(sequence.entry)
        self._count(sequence, -1)

    def set_aside(self, sequence: Sequence) -> None:
        """A sequence leaves the line until its tenant may hold what it needs."""
        self._line.remove(sequence.entry)
        self._aside.setdefault(sequence.account, {})[sequence.key] = sequence

    def call_back(self, now_s: float) -> None:
        """Lets the first of each flow that stands aside into the line again, if there is room for it now."""
        for account, own in list(self._aside.items()):
            first = next(iter(own.values()))
            if not self._residency.is_capped(account.flow, first.table.blocks_for(first.admission_tokens)):
                self.leave(first)
                self.enter(first, now_s)

    def _count(self, sequence: Sequence, sign: int) -> None:
        expected = sequence.prompt_tokens + sequence.expected_output
        self.blocks += sign * -(-expected // self._block_tokens)
        self.prompt_tokens += sign * sequence.prompt_tokens
        self._waiting += sign
        if sign > 0:
            self._residency.on_join(sequence.account.flow)
        else:
            self._residency.on_dequeue(sequence.account.flow)
