"""Burst of extra users who hang up or stop reading: a small load run beside the main one."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from maitred.load.chaos.meter import NOTHING, TokenBill, probe_bill
from maitred.load.chaos.plan import ChaosFault
from maitred.load.measure.record import RequestRecord, RunData, RunProgress
from maitred.load.spec import ArrivalsSpec, LoadSpec, StopCondition

DEFAULT_LEAVE_S = 1.0


class LoadDriver(Protocol):
    """Function that plays a load: `driver.run`, or a replacement in tests."""

    async def __call__(
        self, spec: LoadSpec, *, watch: Callable[[RunProgress], None] | None = None, keep_text: bool = False
    ) -> RunData:
        """Plays the load to its end."""


class BurstRunner:
    """Runner of the bursts of one load run.

    Args:
        spec: Settings of the main load; the users of a burst send requests like its users.
        drive: Function that plays a load.

    Attributes:
        records: Records of the requests of all bursts.
        probes: Tokens that the calibrations of the bursts have cost.
    """

    def __init__(self, spec: LoadSpec, drive: LoadDriver) -> None:
        self.records: list[RequestRecord] = []
        self.probes: TokenBill = NOTHING
        self._spec = spec
        self._drive = drive
        self._count = 0
        self._open: set[asyncio.Task[RunData]] = set()

    async def play(self, fault: ChaosFault) -> str:
        """Plays the users of a `leave` or `stall`, waits for the last one, and returns a summary.

        Raises:
            MaitredError: The server accepts no connection or request.
        """
        self._count += 1
        run = asyncio.create_task(self._drive(burst_spec(self._spec, fault, self._count)), name=f"burst {self._count}")
        self._open.add(run)
        try:
            data = await run
        finally:
            self._open.discard(run)
        self.records += data.records
        self.probes += probe_bill(data)
        outcomes = Counter(record.outcome.value for record in data.records)
        return f"{len(data.records)} users: " + ", ".join(f"{count} {name}" for name, count in outcomes.items())

    async def wait_finished(self) -> None:
        """Waits for the bursts that are still running."""
        if self._open:
            await asyncio.wait(self._open)


def burst_spec(spec: LoadSpec, fault: ChaosFault, number: int) -> LoadSpec:
    """Returns the spec of one burst: its users at once, one question each, without retries."""
    users = fault.clients or 1
    if fault.kind == "leave":
        after_s = DEFAULT_LEAVE_S if fault.after_s is None else fault.after_s
        clients = replace(spec.clients, retries=0, cancel_share=1.0, cancel_after_s=f"{after_s:g}", stall_share=0.0)
    else:
        stall_s = fault.for_s or 0.0
        clients = replace(spec.clients, retries=0, cancel_share=0.0, stall_share=1.0, stall_s=stall_s)
    return replace(
        spec,
        arrivals=ArrivalsSpec(users=users, spread_s=0.0),
        shape=replace(spec.shape, trace=None, turns="1", think_s="0"),
        clients=clients,
        bounds=StopCondition(requests=users, drain_s=spec.bounds.drain_s),
        seed=spec.seed + 1_000_003 * number,  # questions that differ from those of the main load
    )
