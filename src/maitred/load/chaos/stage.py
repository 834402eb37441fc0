"""Stage: plays a load against the installation, with or without faults, and reads the results."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from maitred.load.chaos.burst import BurstRunner, LoadDriver
from maitred.load.chaos.evidence import ChaosPhase
from maitred.load.chaos.faults import Note, inflict
from maitred.load.chaos.installation import RunningInstallation
from maitred.load.chaos.invariants import remains
from maitred.load.chaos.meter import NOTHING, MetricsMeter, TokenBill, probe_bill
from maitred.load.chaos.plan import ChaosFault
from maitred.load.chaos.scrape import MetricsPoller
from maitred.load.chaos.timeline import FaultLog, FaultTimeline
from maitred.load.measure.record import RunData, RunProgress
from maitred.load.spec import LoadSpec

POLL_S = 0.05
_GENERATED = "maitred_engine_output_tokens_total"


class ChaosStage:
    """Stage that both runs of a rehearsal are played on.

    Args:
        spec: Settings of the load.
        installation: Installation, which runs already.
        follower: Poller of its metrics, which is entered already.
        drive: Function that plays a load.
        settle_s: Longest time after a run until the server should hold nothing.
        tell: Callback that receives progress messages.
        watch: Callback for progress, about once a second while a load runs.

    Attributes:
        settled_s: Time from the end of the last run until the server held nothing; None: something remained.
    """

    def __init__(
        self,
        spec: LoadSpec,
        installation: RunningInstallation,
        follower: MetricsPoller,
        drive: LoadDriver,
        *,
        settle_s: float,
        tell: Callable[[str], None],
        watch: Callable[[RunProgress], None] | None,
    ) -> None:
        self._spec = spec
        self._installation = installation
        self._follower = follower
        self._meter: MetricsMeter = MetricsMeter(follower.counters)
        self._drive = drive
        self._settle_s = settle_s
        self._tell = tell
        self._watch = watch
        self.settled_s: float | None = None

    async def play(self, faults: Sequence[ChaosFault]) -> tuple[ChaosPhase, RunData, list[FaultLog]]:
        """Plays the load once with the faults beside it; all faults are undone when this returns or raises."""
        await self._settle()
        billed, generated = self._meter.bill(), self._follower.counters.total(_GENERATED)
        clock = _LoadClock(self._watch)
        bursts = BurstRunner(self._spec, self._drive)

        def fault(which: ChaosFault, note: Note) -> AbstractAsyncContextManager[None]:
            return inflict(which, self._installation, bursts.play, note)

        timeline = FaultTimeline(faults, fault, clock.now_s, self._tell)
        playing = asyncio.create_task(_after(clock, timeline), name="chaos timeline")
        try:
            data = await self._drive(self._spec, watch=clock.watch, keep_text=True)
            await bursts.wait_finished()
        finally:
            playing.cancel()
            await asyncio.wait({playing})
        if not playing.cancelled():
            playing.result()  # an error of the timeline itself must be reported
        self.settled_s = await self._settle()
        phase = ChaosPhase(
            records=data.records,
            bursts=bursts.records,
            billed=_between(billed, self._meter.bill()),
            probes=probe_bill(data) + bursts.probes,
            generated_tokens=_grown(generated, self._follower.counters.total(_GENERATED)),
        )
        return phase, data, timeline.log

    async def _settle(self) -> float | None:
        """Waits for a limited time until the server holds nothing; returns the time, or None on timeout."""
        began_s = time.monotonic()
        while True:
            answers = await self._follower.poll()
            took_s = time.monotonic() - began_s
            left = remains(self._follower.counters.latest)
            if answers and not left:
                return took_s
            if took_s > self._settle_s:
                return None
            await asyncio.sleep(POLL_S)


class _LoadClock:
    """Clock of the load: seconds since its start, which its first progress report tells."""

    def __init__(self, watch: Callable[[RunProgress], None] | None) -> None:
        self.runs = asyncio.Event()
        self._watch = watch
        self._zero_s = 0.0

    def now_s(self) -> float:
        return time.monotonic() - self._zero_s

    def watch(self, progress: RunProgress) -> None:
        if not self.runs.is_set():
            self._zero_s = time.monotonic() - progress.at_s
            self.runs.set()
        if self._watch is not None:
            self._watch(progress)


async def _after(clock: _LoadClock, timeline: FaultTimeline) -> None:
    await clock.runs.wait()
    await timeline.play()


def _between(before: TokenBill | None, after: TokenBill | None) -> TokenBill | None:
    """Returns the bill of a phase. A missing meter before the first answer counts as 0."""
    return None if after is None else after - (before or NOTHING)


def _grown(before: float | None, after: float | None) -> int | None:
    return None if after is None else round(after - (before or 0.0))
