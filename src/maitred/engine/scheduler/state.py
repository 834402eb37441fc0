"""State of the scheduler, and the moves of a sequence between its states.

    add -> waiting --admit--> running --(last token)--> ended
              ^                  |
              +---- preempt -----+
    pause: waiting | running -> paused; resume: paused -> waiting; cancel and expire: any -> ended

Only a running sequence holds blocks. Each move updates all records of the sequence: waiting queue, running batch,
blocks and charges.
"""

from collections.abc import Callable
from dataclasses import dataclass

from maitred.core.request import WaitCause
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.scheduler.accounts import FlowCharges
from maitred.engine.scheduler.batch import RunningBatch
from maitred.engine.scheduler.kv_shares import KVShares
from maitred.engine.scheduler.overcommit import OvercommitSlots
from maitred.engine.scheduler.pins import PinTable
from maitred.engine.scheduler.plan import StepPlan
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.wait_clock import WaitClock
from maitred.engine.scheduler.wait_queue import WaitQueue
from maitred.fairness.fair_queue import FairQueue
from maitred.fairness.heap import Heap


@dataclass(slots=True)
class SchedulerCounters:
    """Counters since the scheduler was made, in tokens and sequences."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    cancelled: int = 0
    wasted_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class SchedulerState:
    """State that the scheduler keeps from one step to the next.

    Args:
        pool: The KV blocks.
        fair_queue: Order of the waiting sequences.
        wait_queue: Waiting sequences.
        batch: Running sequences.
        accounts: Service charges of the flows.
        residency: Floors and ceilings of the tenants' blocks.
        overcommit: Slots of the overcommitted sequences.
        pins: Table of the pinned prefixes.
        comes_back: Returns whether swapping a preempted sequence pays; see `SwapPolicy.pays`.
    """

    def __init__(
        self,
        pool: BlockPool,
        fair_queue: FairQueue[Sequence],
        wait_queue: WaitQueue,
        batch: RunningBatch,
        accounts: FlowCharges,
        residency: KVShares,
        overcommit: OvercommitSlots,
        pins: PinTable,
        comes_back: Callable[[Sequence], bool],
    ) -> None:
        self.pool = pool
        self.line = fair_queue
        self.wait_queue = wait_queue
        self.batch = batch
        self.accounts = accounts
        self.residency = residency
        self.overcommit = overcommit
        self.pins = pins
        self._requeue = comes_back
        self.counters = SchedulerCounters()
        self.waits = WaitClock()
        self.paused: dict[int, Sequence] = {}
        self.deadlines: Heap[Sequence] = Heap()

    def enter(self, sequence: Sequence, now_s: float) -> None:
        """Enqueues a new sequence, or one that resumes after a pause."""
        self.waits.advance(now_s)
        sequence.arrival = self.waits.arrival()
        self.wait_queue.enter(sequence, now_s)

    def admit(self, sequence: Sequence, cached: int, now_s: float) -> None:
        """Starts a sequence with its blocks, of which the prefix cache provides the first `cached` tokens."""
        self.wait_queue.take(sequence, now_s)
        sequence.table.await_no_more()
        self.residency.hold(sequence.account.flow, sequence.table.blocks)
        sequence.computed = cached
        sequence.plain_until = 0
        if sequence.cached_tokens is None:
            sequence.cached_tokens = 0
            self.counters.prompt_tokens += sequence.prompt_tokens
        found = self.accounts.charge_prompt(sequence, cached, cached=True)
        sequence.cached_tokens += found
        self.counters.cached_tokens += found
        sequence.once_computed = max(sequence.once_computed, cached)
        self._record_wait(sequence)
        self.batch.enter(sequence)
        if sequence.key in self.batch.decoding:
            self.accounts.begin_decoding(sequence)

    def on_sample(self, sequence: Sequence) -> None:
        """Notes an output token of a sequence."""
        if self.batch.on_sample(sequence):
            self.accounts.begin_decoding(sequence)

    def grow(self, sequence: Sequence) -> None:
        """Takes the blocks that a sequence's tokens need; the pool must have them."""
        held = len(sequence.table.blocks)
        sequence.table.grow(len(sequence.tokens))
        fresh = sequence.table.blocks[held:]
        self.residency.hold(sequence.account.flow, fresh)
        self.batch.grew(sequence, len(fresh))

    def book(self, sequence: Sequence, start: int, end: int) -> None:
        """Charges tokens that will certainly be computed, and publishes the blocks that they fill."""
        once = sequence.once_computed
        if start < once:
            self.counters.recomputed_tokens += min(end, once) - start
        if end > once:
            self.accounts.charge_prompt(sequence, end)
            sequence.once_computed = end
        table = sequence.table
        if table.window is not None:
            table.window.cover(sequence.computed, end)
        table.publish(sequence.tokens, end)

    def accept(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Records the accepted drafts of a sequence, whose KV is valid."""
        self.counters.drafted_tokens += drafted
        self.counters.accepted_tokens += accepted
        sequence.computed += accepted
        sequence.table.publish(sequence.tokens, sequence.computed)

    def preempt(self, victim: Sequence, plan: StepPlan, now_s: float) -> None:
        """Preempts a sequence: frees its blocks and lets it wait again."""
        if self._requeue(victim):
            victim.table.await_return()
        self._stop(victim)
        victim.preemptions += 1
        victim.displaced = True
        victim.arrival = self.waits.arrival()
        self.counters.preemptions += 1
        self.wait_queue.put_back(victim, now_s)
        plan.preempted.append(victim)

    def withdraw(self, sequence: Sequence) -> None:
        """Removes a sequence from its current state and frees its blocks."""
        sequence.table.await_no_more()
        if sequence.table.blocks:
            self._stop(sequence)
            self.line.done(sequence.account.flow)
        elif self.paused.pop(sequence.key, None) is None:
            self.wait_queue.leave(sequence)

    def end(self, sequence: Sequence) -> None:
        """Ends a sequence in any state."""
        self.withdraw(sequence)
        self.accounts.close(sequence.account)
        self.deadlines.discard(sequence)

    def expire(self, sequence: Sequence, plan: StepPlan) -> None:
        """Ends a sequence because its deadline has passed."""
        self.end(sequence)
        plan.expired.append(sequence)
        self.counters.finished += 1
        if not sequence.request.partial:
            self.counters.wasted_tokens += sequence.output_tokens

    def _stop(self, sequence: Sequence) -> None:
        if self.batch.leave(sequence):
            self.accounts.end_decoding(sequence)
        self.residency.release(sequence.account.flow, sequence.table.blocks)
        sequence.table.release()
        sequence.once_computed = max(sequence.once_computed, sequence.computed)
        sequence.computed = 0

    def _record_wait(self, sequence: Sequence) -> None:
        if not sequence.output_tokens:
            waited = self.waits.on_admit(sequence.key, sequence.arrival)
            if sequence.displaced:
                waited = {WaitCause.KV_FULL.value: sum(waited.values())}
            for cause, seconds in waited.items():
                sequence.waited_s[cause] = sequence.waited_s.get(cause, 0.0) + seconds
        sequence.displaced = False
