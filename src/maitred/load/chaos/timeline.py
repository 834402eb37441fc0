"""Timeline that plays the faults beside the load, and notes when each one began and ended."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import msgspec

from maitred.core.errors import MaitredError
from maitred.load.chaos.faults import Note
from maitred.load.chaos.plan import ChaosFault


class FaultLog(msgspec.Struct, kw_only=True):
    """Log of one fault. Times are seconds since the start of the load.

    Attributes:
        number: Position of the fault in the plan.
        kind, target: Kind and target, as in the plan.
        planned_s: Time at which it was due.
        began_s: Time at which it began; None: never.
        ended_s: Time at which it was undone; for a kill without a restart, the time of the kill. None: it never began.
        said: Description of what was done.
        error: Reason why it could not be done; empty: it was done.
    """

    number: int
    kind: str
    target: str
    planned_s: float
    began_s: float | None = None
    ended_s: float | None = None
    said: list[str] = []
    error: str = ""

    @property
    def name(self) -> str:
        """Name of the fault in reports."""
        return f"fault {self.number} ({' '.join(filter(None, (self.kind, self.target)))})"


_TOO_LATE = "The load had ended by then."


class FaultTimeline:
    """Timeline of the faults of a plan.

    Args:
        faults: Faults of the plan, in any order.
        inflict: Function that makes the context which causes and undoes a fault.
        now_s: Returns the seconds since the start of the load.
        tell: Callback that receives progress messages.

    Attributes:
        log: One entry per fault, in the plan's order.
    """

    def __init__(
        self,
        faults: Sequence[ChaosFault],
        inflict: Callable[[ChaosFault, Note], AbstractAsyncContextManager[None]],
        now_s: Callable[[], float],
        tell: Callable[[str], None],
    ) -> None:
        self._faults = faults
        self._inflict = inflict
        self._now_s = now_s
        self._tell = tell
        self.log = [
            FaultLog(number=number, kind=fault.kind, target=fault.target, planned_s=fault.at_s, error=_TOO_LATE)
            for number, fault in enumerate(faults)
        ]

    async def play(self) -> None:
        """Plays all faults. Cancelling it undoes all active faults at once."""
        async with asyncio.TaskGroup() as group:
            for fault, entry in zip(self._faults, self.log, strict=True):
                group.create_task(self._play(fault, entry), name=f"fault {entry.number}")

    async def _play(self, fault: ChaosFault, entry: FaultLog) -> None:
        await self._wait_until(fault.at_s)
        began_s = round(self._now_s(), 3)

        def note(said: str) -> None:
            entry.said.append(said)
            self._tell(f"{self._now_s():6.1f} s  {entry.name}: {said}")

        try:
            async with self._inflict(fault, note):
                entry.began_s, entry.error = began_s, ""
                lasts_s = 0.0 if fault.kind == "stall" else fault.for_s or 0.0  # stalled clients end by their own timer
                await self._wait_until(self._now_s() + lasts_s)
            entry.ended_s = round(self._now_s(), 3)
            self._tell(f"{entry.ended_s:6.1f} s  {entry.name}: over")
        except MaitredError as error:
            entry.error = error.message
            self._tell(f"{self._now_s():6.1f} s  {entry.name}: {error.message}")
        except asyncio.CancelledError:
            entry.began_s, entry.ended_s, entry.error = began_s, round(self._now_s(), 3), ""
            entry.said.append("undone early, as the load had ended")
            raise

    async def _wait_until(self, at_s: float) -> None:
        # A timer of uvloop counts whole milliseconds, and may end too early.
        while (remaining_s := at_s - self._now_s()) > 0.0:  # noqa: ASYNC110 - no event tells the time
            await asyncio.sleep(remaining_s)
