"""Semaphore whose slots callers take in fair order: whoever asks for many of them waits behind its own work."""

import asyncio

from maitred.core.flow import Flow, FlowLevel
from maitred.core.tenancy import Principal
from maitred.fairness.config import QueueOrderConfig
from maitred.fairness.entry import QueueEntry
from maitred.fairness.vtc import VtcQueue


class FairSemaphore:
    """Semaphore in which callers wait in fair order, by organisation, team and key.

    Args:
        slots: Number of slots.
    """

    def __init__(self, slots: int) -> None:
        self._free_slots = slots
        self._queue: VtcQueue[asyncio.Future[None]] = VtcQueue(QueueOrderConfig())

    @property
    def locked(self) -> bool:
        """Whether a caller has to wait."""
        return not self._free_slots

    async def acquire(self, principal: Principal, cost: float = 1.0) -> Flow:
        """Takes a slot, once it is the caller's turn; returns the flow with which the slot is released.

        Args:
            principal: The caller.
            cost: Cost of what the slot is taken for, in any unit that is the same for all.
        """
        flow = Flow(principal.shares or (FlowLevel(principal.key),))
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        entry = QueueEntry(turn, flow, arrived_s=loop.time(), service=cost)
        self._queue.add(entry, entry.arrived_s)
        self._start_next()
        try:
            # Shielded, so that a turn which comes while its caller is being cancelled is not given to nobody.
            await asyncio.shield(turn)
        except asyncio.CancelledError:
            if turn.done():
                self.release(flow)
            else:
                self._queue.remove(entry)
            raise
        return flow

    def release(self, flow: Flow, cost: float = 0.0) -> None:
        """Returns a slot that the flow has taken.

        Args:
            flow: The flow.
            cost: Cost that became known since then, in the unit of `acquire`.
        """
        self._queue.charge(flow, cost)
        self._queue.done(flow)
        self._free_slots += 1
        self._start_next()

    def _start_next(self) -> None:
        now_s = asyncio.get_running_loop().time()
        while self._free_slots and (entry := self._queue.head(now_s)) is not None:
            self._free_slots -= 1
            self._queue.take(entry, now_s)
            self._queue.charge(entry.flow, entry.service)
            entry.value.set_result(None)
