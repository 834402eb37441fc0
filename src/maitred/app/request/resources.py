"""Resources that a request holds while it is answered."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

T = TypeVar("T")
T_Begun = TypeVar("T_Begun")
T_Entered = TypeVar("T_Entered", bound=AbstractAsyncContextManager[object])


class ContextStack(Protocol):
    """Takes contexts, and leaves them, the last one first, when it is left itself; as an `AsyncExitStack` does."""

    async def enter_async_context(self, cm: AbstractAsyncContextManager[T], /) -> T:
        """Enters a context, to be left with the stack."""
        ...

    def push_async_exit(self, exit: T_Entered, /) -> T_Entered:  # noqa: A002 - as `AsyncExitStack`'s
        """Takes one that has been entered."""
        ...


class ResourceStack(Generic[T_Begun]):
    """A context with what was begun, such as an answer, and the `ContextStack` of all that was taken for it.

    Every request has one and two or three things in it, so this is what of an `AsyncExitStack` it takes, at a few
    calls. None of its contexts may swallow an error.

    Args:
        begin: Takes what it needs, puts it in here, and gives what has begun.
    """

    __slots__ = ("_begin", "_held")

    def __init__(self, begin: Callable[[ContextStack], Awaitable[T_Begun]]) -> None:
        self._begin = begin
        self._held: list[AbstractAsyncContextManager[object]] = []

    async def enter_async_context(self, context: AbstractAsyncContextManager[T], /) -> T:
        """Enters a context, to be left with the stack."""
        entered = await context.__aenter__()
        self._held.append(context)
        return entered

    def push_async_exit(self, context: T_Entered, /) -> T_Entered:
        """Takes over a context that is entered already."""
        self._held.append(context)
        return context

    async def __aenter__(self) -> T_Begun:
        try:
            return await self._begin(self)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure: BaseException | None = None
        while self._held:
            try:
                await self._held.pop().__aexit__(kind, error, trace)
            except BaseException as other:
                kind, error, trace, failure = type(other), other, other.__traceback__, other
        if failure is not None:
            raise failure


class ReusableSlot:
    """A context that leaves what was entered last. It can be left, and filled anew, any number of times.

    An `AsyncExitStack` for one context instead of many, at a few calls: such as the attempt at a replica, which is left
    when the replica fails.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: AbstractAsyncContextManager[object] | None = None

    async def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enters a context, where none is held."""
        entered = await context.__aenter__()
        self._held = context
        return entered

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held, self._held = self._held, None
        if held is not None:
            await held.__aexit__(kind, error, trace)
