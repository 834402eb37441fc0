"""One run from the command line: its display, and what Ctrl-C does to it."""

import asyncio
import signal
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer
from msgspec import structs

from maitred.cli.load.progress import showing
from maitred.core.errors import InvalidRequest
from maitred.load.measure.record import RunData
from maitred.load.report.quantity import plural
from maitred.load.spec import LoadSpec
from maitred.load.workload.session import LoadSession, Workload

if TYPE_CHECKING:
    from maitred.load.measure.result import LoadResult

T = TypeVar("T")


def play(spec: LoadSpec, command: str, *, record: Path | None = None) -> "LoadResult":
    """Plays the load that the spec describes, and measures it.

    Ctrl-C once: no new requests, those that are open may end, and there is a result. Twice: it ends now, without one.

    Args:
        spec: What is asked for.
        command: Of the shell, for the result.
        record: Where to write what was asked, as a trace to replay.

    Raises:
        KeyboardInterrupt: Ctrl-C, twice.
        MaitredError: See `driver.run`.
    """
    from maitred.load.measure.result import LoadResult
    from maitred.load.workload.generator import make_workload

    workload = make_workload(spec)
    played: list[LoadSession] = []
    if record is not None:
        workload = replace(workload, sessions=_collect(workload.sessions, played))
    data = run_loop(_interruptible(spec, workload))
    if record is not None:
        _write_trace(record, replace(workload, sessions=_as_played(played, data)))
    return LoadResult.of(spec, data, command=command, workload=workload.description)


def _collect(sessions: Iterator[LoadSession], played: list[LoadSession]) -> Iterator[LoadSession]:
    for session in sessions:
        played.append(session)
        yield session


def _as_played(sessions: list[LoadSession], data: RunData) -> Iterator[LoadSession]:
    """Returns the sessions that had a turn, with the turns that were asked, at the time when their first was due.

    A closed loop decides that time, and the end of a run cuts sessions that are open.
    """
    began_s = {record.session: record.intended_s for record in reversed(data.records)}
    asked = Counter(record.session for record in data.records)
    timed = [
        structs.replace(session, at_s=began_s[session.id], turns=session.turns[: asked[session.id]])
        for session in sessions
        if session.id in began_s
    ]
    return iter(sorted(timed, key=lambda session: session.at_s or 0.0))


def _write_trace(path: Path, workload: Workload) -> None:
    from maitred.load.workload.traces.recorded import write_recorded

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_recorded(path, workload)
    except OSError as error:
        raise InvalidRequest(f"Cannot write {path}: {error.strerror}. Name another place with --record.") from None


def run_loop(main: Coroutine[None, None, T]) -> T:
    """Runs it in an event loop that is fit for thousands of streams.

    Raises:
        KeyboardInterrupt: It was ended by Ctrl-C.
    """
    import uvloop

    try:
        return uvloop.run(main)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def measure(spec: LoadSpec, workload: Workload, stop: asyncio.Event | None = None) -> RunData:
    """A run inside an event loop, shown as it goes; Ctrl-C is the caller's to handle."""
    from maitred.load.play.driver import run

    arrivals = spec.arrivals
    pace = f"{arrivals.rate_per_s:g} sessions/s" if arrivals.rate_per_s else ""
    pace = plural(arrivals.users, "user") if arrivals.users else pace
    with showing(f"{spec.target.url}: {', '.join(filter(None, (pace, workload.description)))}") as watch:
        return await run(spec, workload, watch=watch, stop=stop)


async def _interruptible(spec: LoadSpec, workload: Workload) -> RunData:
    """A run that the first Ctrl-C stops in order, and the second at once."""
    loop, task, stop = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
    assert task is not None

    def interrupt() -> None:
        if stop.is_set():
            task.cancel()
            return
        stop.set()
        typer.echo(
            f"No new requests. Those that are open may take {spec.bounds.drain_s:g} s to end; Ctrl-C again ends them "
            "now, without a report.",
            err=True,
        )

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        return await measure(spec, workload, stop)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
