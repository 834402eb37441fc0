"""Runtime of a process: a clock without pauses, the garbage collector, and background tasks.

**Clock.** A process can be stopped for a while: its container is paused, its machine is moved or goes to sleep, a
debugger holds it. What it counts in its own memory nobody else can touch meanwhile, and nothing of it has become
untrue. Yet leases would end, because nobody renewed them, and the first requests after the pause would be given what
those that still run have reserved: a hard budget would be overspent.

**Garbage.** Nearly everything that a request makes is gone, by reference counts, when the request is (see also
`maitred.api.dialect.clear_traceback`). Python cannot know that: it looks through what is new after every 700 objects,
and now and then through everything there is, tokenizers, tables of tenants and all the code included. In a gateway
those looks were a tenth of all CPU time, and the thorough ones pauses of the event loop. So what is there when serving
begins is never looked at again, and the rest seldom.

A look takes about a microsecond an object, and nobody is served meanwhile. A request that waits is some 150 objects, so
the generations must be small as well: where the middle one had half a million, a crowd of 4,000 that waited cost all
streams a pause of 0.7 s.

What has become old is as good as never looked at. That is right for what serves, and leaves one thing that is old when
it is let go of, refers to itself, and comes again and again: the generation of a configuration. For these there is
`GcSweep`.
"""

import asyncio
import gc
from collections.abc import Callable, Coroutine, Hashable, Iterable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from maitred.core.clock import Clock


class PauseFreeClock:
    """Another clock less the pauses. Implements `maitred.core.clock.Clock`.

    Args:
        clock: Counts pauses too. Wall time is its own: windows of budgets end whoever sleeps.
        longest_s: A busy event loop may be late by this; what is longer is a pause.
    """

    def __init__(self, clock: Clock, longest_s: float) -> None:
        self._clock = clock
        self._longest_s = longest_s
        self._seen_s = clock.monotonic_s()
        self._paused_s = 0.0

    def monotonic_s(self) -> float:
        """Returns monotonic seconds without the pauses of this process."""
        now_s = self._clock.monotonic_s()
        # Whoever reads the time first after a pause finds it, before anything is decided by it.
        if now_s - self._seen_s > self._longest_s:
            self._paused_s += now_s - self._seen_s
        self._seen_s = now_s
        return now_s - self._paused_s

    def wall_s(self) -> float:
        """Returns the wall time in seconds."""
        return self._clock.wall_s()

    async def run(self) -> None:
        """Ticks until it is cancelled. Only while it runs can a pause be told from a time without requests."""
        while True:
            await asyncio.sleep(self._longest_s / 2)
            self.monotonic_s()


_NEW_OBJECTS = 5_000
"""Beyond those that are gone: 30 requests more than there were."""
_YOUNG, _MIDDLE = 3, 1_000
"""Looks at the younger generation before one at the next."""


_LATER_S = (10.0, 90.0)
"""By the first, busy connections have let go of a generation; by the second, idle connections have been closed, which
hold the generation of their last request until then."""


class GcSweep:
    """Collects garbage among all that came since serving began, some time after a generation was let go of, and again.

    That is a pause of 3 ms where a hundred streams run, and of 50 where it is a thousand.
    """

    def __init__(self) -> None:
        self._due: dict[float, asyncio.TimerHandle] = {}

    def later(self) -> None:
        """Something was let go of. What is let go of until a look is part of it."""
        for after_s in _LATER_S:
            if after_s not in self._due:
                self._due[after_s] = asyncio.get_running_loop().call_later(after_s, self._check, after_s)

    def _check(self, after_s: float) -> None:
        del self._due[after_s]
        gc.collect()


def tune_gc() -> None:
    """Call it once, when everything that stays is there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, _YOUNG, _MIDDLE)


K = TypeVar("K", bound=Hashable)


class KeyedTasks(Generic[K]):
    """Owns them. A context, whose end ends all that are left and raises what one of them has failed with.

    Args:
        work: What is done for a thing until it is cancelled.
        name: What the task is called.
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
        """The things that something is done for."""
        return iter(self._tasks)

    def begin(self, things: Iterable[K]) -> None:
        """For these too, from now on."""
        for thing in things:
            if thing not in self._tasks:
                self._tasks[thing] = asyncio.create_task(self._work(thing), name=self._name(thing))

    def only(self, things: Iterable[K]) -> None:
        """For these, and for no others any more."""
        kept = set(things)
        for thing in [thing for thing in self._tasks if thing not in kept]:
            self._tasks.pop(thing).cancel()
