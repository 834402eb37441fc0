"""Waiting queue: the sequences that wait for admission, and the resources that they will need."""

from collections import Counter

from maitred.core.flow import ServiceWeights
from maitred.engine.scheduler.kv_shares import KVShares
from maitred.engine.scheduler.sequence import FlowCharge, Sequence
from maitred.fairness.fair_queue import FairQueue, QueueEntry


class WaitQueue:
    """Queue of waiting sequences, with those set aside whose tenants are at their KV ceilings.

    The latter must not block others, so they are set aside until a sequence of their tenant has ended.

    Args:
        fair_queue: Order of the waiting sequences.
        weights: Service per token, to predict the cost of a sequence.
        residency: Floors and ceilings of the tenants, which also count waiting sequences.
        block_tokens: Tokens per block.
        by_prefix: Whether the fair queue groups sequences by shared prefix.

    Attributes:
        blocks: KV blocks that the waiting sequences are expected to take, possible prefix cache hits included.
        prompt_tokens: Prompt tokens of all waiting sequences.
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
        """Flow -> sequences set aside, in their order of admission."""
        self._waiting = 0
        self._submissions: Counter[str] = Counter()
        """Waiting sequences of each request of a client; the ids of its prompts differ in their last part only."""

    def __len__(self) -> int:
        return self._waiting

    def taking_turns(self, least: int) -> int:
        """Returns the number of waiting sequences of clients' requests that have more than `least`.

        Of the request that has the most, they count in any case.
        """
        counts = self._submissions.values()
        return sum([count for count in counts if count > least]) or max(counts, default=0)

    def enter(self, sequence: Sequence, now_s: float) -> None:
        """Enqueues a new sequence, or one that returns, in the order of arrival."""
        prompt, scope = sequence.request.prompt, sequence.request.cache_scope
        if sequence.turn is None:
            sequence.turn = self._submissions[_submission(sequence)]
        sequence.entry = QueueEntry(
            sequence,
            sequence.account.flow,
            arrived_s=sequence.arrived_s,
            service=self._weights.service(sequence.prompt_tokens, 0, sequence.expected_output),
            deadline_s=sequence.deadline_s,
            turn=sequence.turn,
            locality=hash((scope, *prompt[: self._block_tokens])) if self._by_prefix else None,
        )
        self._line.add(sequence.entry, now_s)
        self._count(sequence, 1)

    def put_back(self, sequence: Sequence, now_s: float) -> None:
        """Returns a taken sequence to the queue."""
        self._line.requeue(sequence.entry, now_s)
        self._count(sequence, 1)

    def head(self, now_s: float) -> Sequence | None:
        """Returns the sequence that is next in the order."""
        entry = self._line.head(now_s)
        return None if entry is None else entry.value

    def take(self, sequence: Sequence, now_s: float) -> None:
        """Removes a sequence because it is admitted."""
        self._line.take(sequence.entry, now_s)
        self._count(sequence, -1)

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence that ends its wait without admission."""
        own = self._aside.get(sequence.account)
        if own is not None and own.pop(sequence.key, None) is not None:
            if not own:
                del self._aside[sequence.account]
        else:
            self._line.remove(sequence.entry)
        self._count(sequence, -1)

    def set_aside(self, sequence: Sequence) -> None:
        """Sets a sequence aside until its tenant may hold the blocks that it needs."""
        self._line.remove(sequence.entry)
        self._aside.setdefault(sequence.account, {})[sequence.key] = sequence

    def call_back(self, now_s: float) -> None:
        """Returns each flow's first set-aside sequence to the queue if its tenant may now hold its blocks."""
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
        submission = _submission(sequence)
        self._submissions[submission] += sign
        if not self._submissions[submission]:
            del self._submissions[submission]
        if sign > 0:
            self._residency.on_join(sequence.account.flow)
        else:
            self._residency.on_dequeue(sequence.account.flow)


def _submission(sequence: Sequence) -> str:
    """Returns the id of the client's request to which a sequence belongs."""
    return sequence.request.id.rpartition("-")[0]
