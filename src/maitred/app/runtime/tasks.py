"""Tasks that go on in the background for as long as somebody needs what they do, each for one thing."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

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
