"""Faults of a rehearsal: one asynchronous context manager per kind.

Entering the context causes the fault. Leaving it undoes the fault, whether its time is over, the rehearsal failed or
somebody pressed Ctrl-C. So chaos never leaves a process stopped or a limit lowered.
"""

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress

import psutil

from maitred.core.errors import Unavailable
from maitred.load.chaos.installation import RunningInstallation
from maitred.load.chaos.plan import ChaosFault

SLOW_PERIOD_S = 0.1
"""Period of a slow process: it runs for a part of it and is stopped for the rest."""

Burst = Callable[[ChaosFault], Awaitable[str]]
"""Function that plays the clients of a `leave` or a `stall` to their end, and returns a summary."""

Note = Callable[[str], None]
"""Callback that receives a fault's message for the log."""


def inflict(
    fault: ChaosFault, installation: RunningInstallation, burst: Burst, note: Note
) -> AbstractAsyncContextManager[None]:
    """Returns the fault as a context. Faults without an end (kill, leave, stall) act fully on entry.

    Raises (on entering):
        Unavailable: The target does not exist, or the system forbids the fault.
    """
    match fault.kind:
        case "kill":
            return _kill(fault, installation, note)
        case "hang":
            return _hang(installation.processes.find(fault.target), note)
        case "slow":
            return _slow(installation.processes.find(fault.target), fault.speed or 0.5, note)
        case "partition":
            return _partition(fault, installation, note)
        case "delay" | "throttle":
            return _slow_link(fault, installation, note)
        case "store_down":
            if fault.how == "kill":
                return _kill(fault, installation, note)
            if fault.how == "hang":
                return _hang(installation.processes.find(fault.target), note)
            return _partition(fault, installation, note)
        case "disk_full":
            return _limit_resource(
                installation.processes.find(fault.target), resource.RLIMIT_FSIZE, 0, "file size", note
            )
        case "memory":
            process = installation.processes.find(fault.target)
            mapped_bytes = process.memory_info().vms
            return _limit_resource(
                process, resource.RLIMIT_AS, mapped_bytes + (fault.spare_bytes or 0), "address space", note
            )
        case "clock_jump":
            return _clock(fault, installation, note)
        case "leave" | "stall":
            return _burst(fault, burst, note)


@asynccontextmanager
async def _kill(fault: ChaosFault, installation: RunningInstallation, note: Note) -> AsyncIterator[None]:
    """Kills with SIGKILL. With a duration, restarts the process that chaos started, and waits for it."""
    installation.note_processes()
    process = installation.processes.find(fault.target)
    with _name_process_errors(process):
        process.kill()
    note(f"killed process {process.pid}")
    yield
    if fault.for_s is not None:
        await installation.start()
        note(f"started again as process {installation.pid}")


@asynccontextmanager
async def _hang(process: psutil.Process, note: Note) -> AsyncIterator[None]:
    """Stops a process with SIGSTOP, and continues it with SIGCONT."""
    try:
        with _name_process_errors(process):
            process.suspend()
        note(f"stopped process {process.pid}")
        yield
    finally:
        _go_on(process)


@asynccontextmanager
async def _slow(process: psutil.Process, speed: float, note: Note) -> AsyncIterator[None]:
    """Sends SIGSTOP and SIGCONT in turn, so that the process runs for the share `speed` of the time."""
    ran_s = stood_s = 0.0

    async def drag() -> None:
        nonlocal ran_s, stood_s
        while True:
            began_s = time.monotonic()
            process.suspend()
            await asyncio.sleep((1 - speed) * SLOW_PERIOD_S)
            process.resume()
            ran_from_s = time.monotonic()
            stood_s += ran_from_s - began_s
            await asyncio.sleep(speed * SLOW_PERIOD_S)
            ran_s += time.monotonic() - ran_from_s

    note(f"process {process.pid} is stopped and continued")
    dragging = asyncio.create_task(drag(), name="slow")
    try:
        yield
    finally:
        dragging.cancel()
        await asyncio.wait({dragging})
        _go_on(process)
        if ran_s + stood_s > 0:
            note(f"it ran for {ran_s / (ran_s + stood_s):.0%} of the time")
        if not dragging.cancelled() and dragging.exception() is not None:
            note("it ended meanwhile")


@asynccontextmanager
async def _partition(fault: ChaosFault, installation: RunningInstallation, note: Note) -> AsyncIterator[None]:
    link = installation.links[fault.target]
    async with AsyncExitStack() as stack:
        match fault.how or "blackhole":
            case "refuse":
                stack.push_async_callback(link.accept)
                await link.refuse()
            case "reset":
                stack.enter_context(link.resetting())
            case _:
                stack.enter_context(link.blackhole(fault.direction or "both"))
        note(f"{fault.how or 'blackhole'} at {link.address}")
        yield


@asynccontextmanager
async def _slow_link(fault: ChaosFault, installation: RunningInstallation, note: Note) -> AsyncIterator[None]:
    link = installation.links[fault.target]
    try:
        if fault.delay_s is not None:
            link.delay_s = fault.delay_s
        if fault.bytes_per_s is not None:
            link.bytes_per_s = fault.bytes_per_s
        note(f"{fault.kind} at {link.address}")
        yield
    finally:
        if fault.delay_s is not None:
            link.delay_s = 0.0
        if fault.bytes_per_s is not None:
            link.bytes_per_s = None


@asynccontextmanager
async def _limit_resource(
    process: psutil.Process, limit: int, value: int, resource: str, note: Note
) -> AsyncIterator[None]:
    """Lowers a soft limit of a running process, and raises it again.

    A file-size limit of 0 makes every write to a file fail with EFBIG, much as a full disk fails with ENOSPC. It needs
    neither root nor a spare file system. (The kernel kills a program that does not ignore SIGXFSZ; Python ignores it.)
    """
    with _name_process_errors(process):
        before, most = process.rlimit(limit)
    try:
        with _name_process_errors(process):
            process.rlimit(limit, (value, most))
        note(f"{resource} of process {process.pid} limited to {value} bytes")
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.rlimit(limit, (before, most))


@asynccontextmanager
async def _clock(fault: ChaosFault, installation: RunningInstallation, note: Note) -> AsyncIterator[None]:
    assert installation.clock is not None, "the rehearsal makes one where the plan needs it"
    try:
        installation.clock.set(fault.jump_s or 0.0)
        note(f"the time of day is off by {fault.jump_s:+g} s")
        yield
    finally:
        installation.clock.set(0.0)


@asynccontextmanager
async def _burst(fault: ChaosFault, burst: Burst, note: Note) -> AsyncIterator[None]:
    note(await burst(fault))
    yield


@contextmanager
def _name_process_errors(process: psutil.Process) -> Iterator[None]:
    """Converts a system error about a process to one sentence."""
    try:
        yield
    except psutil.NoSuchProcess:
        raise Unavailable(f"Process {process.pid} has ended.") from None
    except (psutil.AccessDenied, PermissionError):
        raise Unavailable(f"Process {process.pid} belongs to another user. Run chaos as that user.") from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"The system refuses this for process {process.pid}: {error}.") from None


def _go_on(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.resume()
