"""Stack of the async contexts of a request, exited in reverse order."""

from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")
T_Entered = TypeVar("T_Entered", bound=AbstractAsyncContextManager[object])


class ResourceStack:
    """Stack of async contexts. It has the methods of `contextlib.AsyncExitStack` that a request needs.

    Every request opens two of these and enters two contexts. With `AsyncExitStack`, this took a tenth of the processor
    time of a whole answer (see `benchmarks/LOG.md`). This class is cheaper, because a context cannot suppress an error:
    each context exits with the error of the block, or with an error that another context raised during its exit.
    """

    __slots__ = ("_contexts",)

    def __init__(self) -> None:
        self._contexts: list[AbstractAsyncContextManager[object]] = []

    async def enter_async_context(self, context: AbstractAsyncContextManager[T], /) -> T:
        """Enters a context and returns its value."""
        entered = await context.__aenter__()
        self._contexts.append(context)
        return entered

    def push_async_exit(self, context: T_Entered, /) -> T_Entered:
        """Adds a context that was entered elsewhere, and returns it."""
        self._contexts.append(context)
        return context

    def pop_all(self) -> "ResourceStack":
        """Moves all contexts into a new stack, which the caller must exit instead of this one."""
        other = ResourceStack()
        other._contexts, self._contexts = self._contexts, []
        return other

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure: BaseException | None = None
        while self._contexts:
            try:
                await self._contexts.pop().__aexit__(kind, error, trace)
            except BaseException as other:
                kind, error, trace, failure = type(other), other, other.__traceback__, other
        if failure is not None:
            raise failure
