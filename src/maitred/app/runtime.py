"""Runtime of a process: a clock without pauses, the garbage collector, memory, and background tasks.

**Clock.** A process can be stopped for a while: its container is paused, its machine is moved or suspended, or a
debugger stops it. During this time no other process can change the counters in its memory, so they stay correct. Yet
leases would end because nobody renewed them, and the first requests after the pause would get amounts that running
requests have reserved: a hard budget would be overspent.

**Garbage.** Reference counts free nearly all objects of a request when the request ends (see also
`maitred.api.dialect.clear_traceback`). Python cannot know this: its collector scans the new objects after every 700
objects, and from time to time all objects, including tokenizers, tables of tenants and all code. In a gateway these
scans took a tenth of all CPU time, and the full scans paused the event loop. So the objects that exist when serving
begins are excluded from later scans, and other objects are scanned seldom.

A scan takes about a microsecond per object, and no request is served during it. A waiting request consists of about 150
objects, so the generations must also be small: with a middle generation of half a million objects, 4,000 waiting
requests paused all streams for 0.7 s.

Objects in the oldest generation are almost never scanned. This is right for the objects that serve, with one exception,
which becomes old before it is freed, contains reference cycles, and occurs again and again: the generation of the
configuration. `GcSweep` collects these generations.
"""

import asyncio
import ctypes
import gc
from collections.abc import Callable, Coroutine, Hashable, Iterable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from maitred.core.clock import Clock


class PauseFreeClock:
    """Clock without the pauses of the process. Implements `maitred.core.clock.Clock`.

    The clock stands still while its own task is overdue. So leases wait for their renewals, whether the process was
    stopped or its event loop had thousands of requests to handle before the next timer.

    Args:
        clock: Clock that also counts pauses. Its wall time is used unchanged, because budget windows end during a
            pause, too.
        longest_s: Most time that passes on this clock between two ticks.
    """

    def __init__(self, clock: Clock, longest_s: float) -> None:
        self._clock = clock
        self._longest_s = longest_s
        self._ticked_s = clock.monotonic_s()
        self._paused_s = 0.0

    def monotonic_s(self) -> float:
        """Returns monotonic seconds without the pauses of this process."""
        return min(self._clock.monotonic_s(), self._ticked_s + self._longest_s) - self._paused_s

    def wall_s(self) -> float:
        """Returns the wall time in seconds."""
        return self._clock.wall_s()

    def tick(self) -> None:
        """Lets time pass again, at a moment at which the event loop handles its timers."""
        now_s = self._clock.monotonic_s()
        self._paused_s += max(0.0, now_s - self._ticked_s - self._longest_s)
        self._ticked_s = now_s

    async def run(self) -> None:
        """Ticks until it is cancelled."""
        while True:
            await asyncio.sleep(self._longest_s / 2)
            self.tick()


_NEW_OBJECTS = 5_000
"""Number of new objects, less the freed ones, that starts a scan: those of 30 additional requests."""
_YOUNG, _MIDDLE = 3, 1_000
"""Number of scans of a younger generation before the next one is scanned."""


_LATER_S = (10.0, 90.0)
"""Delays of the two collections: after the first, busy connections have released the old generation; after the second,
idle connections have been closed, which keep the generation of their last request until then."""


class GcSweep:
    """Collects the garbage that arose since serving began, twice after a generation was released.

    Each collection pauses the process for 3 ms with a hundred streams, and for 50 ms with a thousand.
    """

    def __init__(self) -> None:
        self._due: dict[float, asyncio.TimerHandle] = {}

    def later(self) -> None:
        """Schedules the collections after a generation was released.

        A collection that is already scheduled includes objects that are released before it.
        """
        for after_s in _LATER_S:
            if after_s not in self._due:
                self._due[after_s] = asyncio.get_running_loop().call_later(after_s, self._check, after_s)

    def _check(self, after_s: float) -> None:
        del self._due[after_s]
        gc.collect()


_M_ARENA_MAX = -8
"""Parameter of `mallopt`, from glibc's malloc.h."""


def limit_malloc_arenas() -> None:
    """Lets all threads of this process allocate from one arena, where the C library is glibc.

    By default each thread gets an arena of its own, and large bodies, which are decompressed and decoded in threads,
    leave their largest size in each. Python's lock keeps these threads from competing for the one arena.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def tune_gc() -> None:
    """Tunes the garbage collector; call it once, when all permanent objects exist."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, _YOUNG, _MIDDLE)


K = TypeVar("K", bound=Hashable)


class KeyedTasks(Generic[K]):
    """Runs one background task per key. The end of its context ends them and raises errors.

    Args:
        work: The coroutine for a key, which runs until it is cancelled.
        name: Returns the name of the task of a key.
    """

    def __init__(self, work: Callable[[K], Coroutine[Any, Any, None]], name: Callable[[K], str]) -> None:
        self._work = work
        self._name = name
        self._tasks: dict[K, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = list(self._tasks.values())
        self.only(())
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()

    def __iter__(self) -> Iterable[K]:
        """Returns the keys that have a task."""
        return iter(self._tasks)

    def begin(self, things: Iterable[K]) -> None:
        """Starts tasks for these keys too."""
        for thing in things:
            if thing not in self._tasks:
                self._tasks[thing] = asyncio.create_task(self._work(thing), name=self._name(thing))

    def only(self, things: Iterable[K]) -> None:
        """Keeps only the tasks of these keys, and cancels the others."""
        kept = set(things)
        for thing in [thing for thing in self._tasks if thing not in kept]:
            self._tasks.pop(thing).cancel()
