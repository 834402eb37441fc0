"""A place for one context at a time, such as the one in which a request is at a replica: it is left when that fails.

What `AsyncExitStack` is to many this is to one, at a few calls.
"""

from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")


class Slot:
    """A context that leaves what was entered last. It can be left, and filled anew, any number of times."""

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
