"""One run from the command line: its display, and what Ctrl-C does to it."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import TYPE_CHECKING, TypeVar

import typer

from maitred.cli.load.progress import showing
from maitred.load.record import RunData
from maitred.load.session import Workload
from maitred.load.spec import LoadSpec

if TYPE_CHECKING:
    from maitred.load.result import Result

T = TypeVar("T")


def play(spec: LoadSpec, command: str) -> "Result":
    """Plays the load that the spec describes, and measures it.

    Ctrl-C once: no new requests, those that are open may end, and there is a result. Twice: it ends now, without one.

    Raises:
        KeyboardInterrupt: Ctrl-C, twice.
        MaitredError: See `driver.run`.
    """
    from maitred.load.result import Result
    from maitred.load.workload import make_workload

    workload = make_workload(spec)
    title = f"{spec.target.url}: {workload.description}"
    data = run_loop(measure(spec, workload, title, Interrupt()))
    return Result.of(spec, data, command=command, workload=workload.description)


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


class Interrupt:
    """What Ctrl-C does while it is installed: first an orderly stop, then an end.

    Attributes:
        stop: Set by the first Ctrl-C.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()

    def install(self, drain_s: float) -> None:
        """Takes Ctrl-C over for the running task."""
        task = asyncio.current_task()
        assert task is not None

        def interrupt() -> None:
            if self.stop.is_set():
                task.cancel()
                return
            self.stop.set()
            typer.echo(
                f"No new requests. Those that are open may take {drain_s:g} s to end; Ctrl-C again ends them now, "
                "without a report.",
                err=True,
            )

        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)

    def remove(self) -> None:
        """Gives Ctrl-C back."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)


async def measure(spec: LoadSpec, workload: Workload, title: str, interrupt: Interrupt) -> RunData:
    """The run itself, shown as it goes."""
    from maitred.load.driver import run

    interrupt.install(spec.bounds.drain_s)
    try:
        with showing(title) as watch:
            return await run(spec, workload, watch=watch, stop=interrupt.stop)
    finally:
        interrupt.remove()
