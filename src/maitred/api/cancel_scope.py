"""Ending what a task does from outside, with a reason.

An answer can take minutes, and two things may end it at any moment: the client leaves, or the server has to stop.
Both reach the task as a cancellation, so that every `async with` on its stack lets go of what it holds; and both leave
the `CancelScope` block as the exception that says why. This is how `asyncio.timeout` works, with other reasons than
time.
"""

import asyncio
from types import TracebackType
from typing import Self


class ClientDisconnected(Exception):
    """The connection is closed: nobody reads the rest. Not an error, and never answered."""


class CancelScope:
    """A block of one task that others can end.

    Example::

        with Interruptible() as block:
            doorbell.add_listener(lambda: block.interrupt(ClientLeft()))
            await long_work()
    """

    _task: asyncio.Task[object] | None = None
    _cancelling = 0
    _reason: Exception | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        return self

    def interrupt(self, reason: Exception) -> None:
        """Ends the block with `reason`; only the first reason counts, and none after the block has ended."""
        if self._task is not None and self._reason is None:
            self._reason = reason
            # As the message too, for those on the stack who settle differently with a caller that left and with us.
            self._task.cancel(reason)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Raises the reason where that has ended the block.
        task, self._task = self._task, None
        if task is None or self._reason is None:
            return
        # If someone else cancelled the task as well, that cancellation stands and must go on.
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._reason from None
