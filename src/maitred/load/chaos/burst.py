"""More users all at once, who hang up or stop reading: a small load run of its own beside the main one."""

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
    """How a load is played: `driver.run`, or what a test has in its place."""

    async def __call__(
        self, spec: LoadSpec, *, watch: Callable[[RunProgress], None] | None = None, keep_text: bool = False
    ) -> RunData:
        """Plays it to its end."""


class BurstRunner:
    """The bursts of one run.

    Args:
        spec: Of the main load; the users of a burst ask like its users.
        drive: Plays a load.

    Attributes:
        records: What became of all of them.
        probes: What the calibrations of their runs have cost.
    """

    def __init__(self, spec: LoadSpec, drive: LoadDriver) -> None:
        self.records: list[RequestRecord] = []
        self.probes: TokenBill = NOTHING
        self._spec = spec
        self._drive = drive
        self._count = 0
        self._open: set[asyncio.Task[RunData]] = set()

    async def play(self, fault: ChaosFault) -> str:
        """Lets the users of a `leave` or `stall` come, and waits until the last one has gone; what became of them.

        Raises:
            MaitredError: The server takes nobody.
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
        """Waits for those that are under way."""
        if self._open:
            await asyncio.wait(self._open)


def burst_spec(spec: LoadSpec, fault: ChaosFault, number: int) -> LoadSpec:
    """The load of one burst: so many users at once, one question each, none of them tried again."""
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
        seed=spec.seed + 1_000_003 * number,  # other questions than the main load's
    )
