"""Driver of a run: plays the sessions of a workload and keeps a record of every request.

Open loop: each session begins when it is due, independent of the server. Closed loop: a fixed number of users, each of
whom sends a request, reads, thinks and sends again. In both cases, the latency of a request starts when it was due, not
when it was sent.
"""

import asyncio
import random
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import suppress

from maitred.load.measure.record import LoadTesterSample, RunData, RunProgress
from maitred.load.play.client.origin import Origin
from maitred.load.play.client.pool import ConnectionPool
from maitred.load.play.clock import RunClock, calm_collector
from maitred.load.play.conversation import Conversations
from maitred.load.play.doors import StartGate
from maitred.load.play.monitor import LoadTesterMonitor
from maitred.load.play.target import calibrate
from maitred.load.spec import LoadSpec
from maitred.load.workload.arrivals import parse_profile
from maitred.load.workload.generator import make_workload
from maitred.load.workload.lengths import parse_distribution
from maitred.load.workload.session import LoadSession, Workload

DEFAULT_DURATION_S = 60.0
MOST_AT_ONCE = 64
"""Number of overdue sessions that begin before the event loop runs other tasks. With many sessions due at once, the
first ones must not wait for all others, and the loop must not run once for each."""
LOOK_S = 0.05
"""Interval at which a user who is inactive by the profile checks the profile again."""


async def run(
    spec: LoadSpec,
    workload: Workload | None = None,
    *,
    watch: Callable[[RunProgress], None] | None = None,
    stop: asyncio.Event | None = None,
    keep_text: bool = False,
) -> RunData:
    """Plays a workload to its end.

    Args:
        spec: Settings of the run.
        workload: Workload to play instead of the one that the spec describes.
        watch: Callback for progress, about once a second.
        stop: Event after which no further request is sent; open requests are waited for as at the regular end.
        keep_text: Whether the records keep the text of the answers.

    Raises:
        ConfigInvalid: The spec contains settings that cannot be combined.
        InvalidRequest: The server refuses a first small request, or the spec names something that does not exist.
        Unavailable: The server does not answer.
    """
    workload = workload or make_workload(spec)
    origin = Origin.parse(spec.target.url)
    _allow_many_files()
    address = spec.target.unix_socket or await origin.resolve()
    clock = RunClock()
    pool = ConnectionPool(origin, address, connect_timeout_s=spec.clients.connect_timeout_s, clock=clock)
    try:
        calibration = await calibrate(spec.target, pool)
        doors = StartGate(
            clock.now_s, duration_s=_duration_s(spec), requests=spec.bounds.requests, stop=stop or asyncio.Event()
        )
        conversations = Conversations(
            spec, workload.block_tokens, pool, calibration, doors=doors, now_s=clock.now_s, keep_text=keep_text
        )
        progress = _ProgressReport(doors, conversations, watch)
        with calm_collector():
            clock.restart()
            started_unix_s = time.time()
            async with LoadTesterMonitor(clock.now_s, lambda: conversations.open, progress.report) as monitor:
                await _Crowd(spec, workload, conversations, doors, now_s=clock.now_s).play()
                return RunData(
                    records=conversations.records,
                    samples=monitor.samples,
                    seconds=clock.now_s(),
                    started_unix_s=started_unix_s,
                    lag_s=monitor.lag_s,
                    server=calibration.server,
                    model=calibration.model,
                    tokens_per_word=calibration.tokens_per_word,
                    template_tokens=calibration.template_tokens,
                    text_seed=conversations.text_seed,
                    cpu_seconds=monitor.cpu_seconds,
                    peak_memory_bytes=monitor.peak_memory_bytes,
                )
    finally:
        pool.close()


class _Crowd:
    """Arrivals of a run: sessions at their times, or users who stay for the whole run."""

    def __init__(
        self,
        spec: LoadSpec,
        workload: Workload,
        conversations: Conversations,
        doors: StartGate,
        now_s: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._sessions = workload.sessions
        self._conversations = conversations
        self._doors = doors
        self._now_s = now_s
        self._profile = parse_profile(spec.arrivals.profile)
        self._think = parse_distribution(spec.shape.think_s, what="shape.think_s")

    async def play(self) -> None:
        """Starts sessions until the gate closes, waits for open ones, and cancels those that take too long."""
        async with self._doors, asyncio.TaskGroup() as group:
            inside = group.create_task(self._let_in(), name="load crowd")
            closed = group.create_task(self._doors.wait_closed(), name="load doors")
            await asyncio.wait({inside, closed}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({inside}, timeout=self._spec.bounds.drain_s)
            inside.cancel()
            closed.cancel()

    async def _let_in(self) -> None:
        """Starts all sessions or users, and returns when all of them have ended."""
        users = self._spec.arrivals.users
        async with asyncio.TaskGroup() as group:
            if users is not None:
                for number in range(users):
                    group.create_task(self._user(number, users))
                return
            overdue = 0
            for session in self._sessions:
                due_s = session.at_s or 0.0
                overdue = overdue + 1 if due_s <= self._now_s() else 0
                if overdue > MOST_AT_ONCE:
                    await asyncio.sleep(0)
                    overdue = 0
                if not await self._doors.until(due_s):
                    return
                group.create_task(self._conversations.hold(session, due_s))

    async def _user(self, number: int, users: int) -> None:
        """Runs one user: starts one session after the other as long as the gate is open."""
        think = random.Random(f"{self._spec.seed}:user:{number}")
        due_s = self._spec.arrivals.spread_s * number / users
        while await self._doors.until(due_s):
            if number >= round(users * self._profile.factor(due_s)):
                due_s += LOOK_S
                continue
            session = self._next_session()
            if session is None:
                return
            due_s = await self._conversations.hold(session, due_s) + self._think.draw(think)

    def _next_session(self) -> LoadSession | None:
        return next(self._sessions, None)


class _ProgressReport:
    """Progress report of a run for its watcher."""

    def __init__(
        self, doors: StartGate, conversations: Conversations, watch: Callable[[RunProgress], None] | None
    ) -> None:
        self._doors = doors
        self._conversations = conversations
        self._watch = watch
        self._last_s = 0.0
        self._last_pieces = 0

    def report(self, sample: LoadTesterSample) -> None:
        """Sends the figures since the last report to the watcher."""
        if self._watch is None:
            return
        now = self._conversations
        pieces, span_s = now.traffic.pieces - self._last_pieces, sample.at_s - self._last_s
        self._last_pieces, self._last_s = now.traffic.pieces, sample.at_s
        answered = [record for record in now.recent if record.arrivals_s]
        gaps_s = [
            (record.arrivals_s[-1] - record.arrivals_s[0]) / (len(record.arrivals_s) - 1)
            for record in answered
            if len(record.arrivals_s) > 1
        ]
        self._watch(
            RunProgress(
                at_s=sample.at_s,
                share=self._share(sample.at_s),
                due=len(now.records),
                open=now.open,
                ended=dict(now.ended),
                output_tokens_per_s=pieces / span_s if span_s > 0 else 0.0,
                ttft_s=_median([record.arrivals_s[0] - record.intended_s for record in answered]),
                itl_s=_median(gaps_s),
                cpu_share=sample.cpu_share,
                lag_s=sample.lag_s,
            )
        )

    def _share(self, at_s: float) -> float | None:
        shares = []
        if self._doors.duration_s is not None:
            shares.append(at_s / self._doors.duration_s)
        if self._doors.requests is not None:
            shares.append(sum(self._conversations.ended.values()) / self._doors.requests)
        return min(1.0, max(shares)) if shares else None


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def _duration_s(spec: LoadSpec) -> float | None:
    """Returns how long requests are due; a run without any bound gets a default duration."""
    bounds = spec.bounds
    unbounded = bounds.duration_s is None and bounds.requests is None and spec.shape.trace is None
    return DEFAULT_DURATION_S if unbounded else bounds.duration_s


def _allow_many_files() -> None:
    """Raises the limit of open files, because every stream needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
