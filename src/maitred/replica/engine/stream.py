"""The answer to one request: what the connection has delivered and the reader has not yet taken.

The connection pushes, the reader pulls; both live on one event loop, so nothing here is locked and nothing but the
reader's own wait ever awaits. What piles up is bounded twice. More tokens than `max_tokens` in each of `n` choices are
a breach of the protocol; and once `PAUSE_AT_TOKENS` lie unread the stream pauses the engine's work by itself, until
they are read. Beyond that comes only what was on its way.
"""

import asyncio
from collections.abc import Callable, Sequence

from maitred.core.errors import Bug, MaitredError, ProtocolViolation
from maitred.core.request import EngineRequest, TokenDelta

PAUSE_AT_TOKENS = 512
"""Many seconds of text for a reader, and a few kilobytes for us."""


class EngineStream:
    """Implements `core.ports.TokenStream` for `EngineLink`.

    Args:
        wire_id: How the connection and the engine call the request.
        request: Says which choices, and how many tokens of each, may come.
        send_cancel: Tells the engine that a choice (or None: all that are left) is no longer wanted.
        send_pause: Tells the engine to compute no more of the request (True) or to go on.
        pause_at_tokens: Unread tokens at which the stream pauses by itself.
    """

    __slots__ = (
        "_cancelled",
        "_failure",
        "_held",
        "_listener",
        "_pause_at_tokens",
        "_paused",
        "_pending",
        "_pending_tokens",
        "_running",
        "_send_cancel",
        "_send_pause",
        "_tokens_left",
        "_waiter",
        "wire_id",
    )

    def __init__(
        self,
        wire_id: str,
        request: EngineRequest,
        send_cancel: Callable[[str, int | None], None],
        send_pause: Callable[[str, bool], None],
        *,
        pause_at_tokens: int = PAUSE_AT_TOKENS,
    ) -> None:
        self.wire_id = wire_id
        begun = request.begun
        self._running = set(begun)
        self._tokens_left = sum(request.sampling.max_tokens - len(output) for output in begun.values())
        self._cancelled: set[int] = set()
        self._pending: list[TokenDelta] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[Sequence[TokenDelta]], bool] | None = None
        self._send_cancel = send_cancel
        self._send_pause = send_pause
        self._pause_at_tokens = pause_at_tokens
        self._pending_tokens = 0
        self._held = False
        """Whether the reader has asked for a pause."""
        self._paused = False
        """What the engine was told last."""

    def __aiter__(self) -> "EngineStream":
        return self

    async def __anext__(self) -> list[TokenDelta]:
        """Everything that came since the last call, waiting if that is nothing.

        Raises:
            ReplicaLost: The connection died; what had arrived was handed out before.
            CallerError: The engine rejected the request; `ReplicaUnavailable` if another one might take it.
            RuntimeError: Two tasks read one stream.
        """
        while not self._pending:
            if self._failure is not None:
                raise self._failure
            if not self._running:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError("A token stream has one reader; another task is already waiting on this one.")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._taken()

    def listen(self, hear: Callable[[Sequence[TokenDelta]], bool]) -> None:
        """See `core.ports.TokenStream`."""
        self._listener = hear

    def cancel(self, index: int) -> None:
        """Ends one choice; what of it was not read yet is dropped."""
        self._pending = [delta for delta in self._pending if delta.index != index]
        if index in self._running:
            self._running.discard(index)
            self._cancelled.add(index)
            self._send_cancel(self.wire_id, index)
            if not self._running:
                self._rouse()
        self._pending_tokens = sum(len(delta.tokens) for delta in self._pending)
        self._settle_pause()

    def pause(self) -> None:
        """See `core.ports.TokenStream`; what is on its way still comes."""
        self._held = True
        self._settle_pause()

    def resume(self) -> None:
        """See `core.ports.TokenStream`; work goes on once no more than the limit is unread."""
        self._held = False
        self._settle_pause()

    def push(self, delta: TokenDelta) -> None:
        """Takes a delta from the connection.

        This runs once for every token of every request. It does not wake the reader: see `wake`.

        Raises:
            ProtocolViolation: The choice does not exist or had already finished, or there are too many tokens.
        """
        index = delta.index
        if index not in self._running:
            if index in self._cancelled:
                return  # on its way when we cancelled
            raise ProtocolViolation(
                f"The engine sent tokens of choice {index} of {self.wire_id}, which is not running."
            )
        self._tokens_left -= len(delta.tokens)
        if self._tokens_left < 0:
            raise ProtocolViolation(f"The engine sent more tokens of {self.wire_id} than were asked for.")
        if delta.finish is not None:
            self._running.discard(index)
        self._pending.append(delta)
        self._pending_tokens += len(delta.tokens)
        if self._pending_tokens >= self._pause_at_tokens:
            self._settle_pause()

    def wake(self) -> None:
        """Lets the reader have what was pushed, if it waits; who hears it may spare the reader that."""
        if self._pending and self._waiter is not None and not self._waiter.done() and not self._on_wake():
            self._waiter.set_result(None)

    def fail(self, failure: MaitredError) -> None:
        """Ends the stream with an error, after what is pending. A stream that is complete stays complete."""
        if self._running:
            self._running.clear()
            self._failure = failure
            self._rouse()

    def close(self) -> None:
        """The reader leaves: whatever has not finished is cancelled, in one message."""
        if self._running:
            self._running.clear()
            self._send_cancel(self.wire_id, None)
        self._pending, self._listener = [], None
        # A read after this would look like a complete answer if it just ended.
        self._failure = self._failure or Bug("A token stream was read after its context was left.")
        self._rouse()

    def _rouse(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _on_wake(self) -> bool:
        """Whether what was pushed has found its way without the reader."""
        if self._listener is None:
            return False
        try:
            if not self._listener(self._pending):
                return False
        except Exception as error:  # this is where the messages of all are read
            self._failure = error
            self._taken()
            return False
        self._taken()
        return bool(self._running)  # at the end it has to be woken

    def _taken(self) -> list[TokenDelta]:
        """What was pushed; it is not here any more."""
        batch, self._pending = self._pending, []
        self._pending_tokens = 0
        if self._paused:
            self._settle_pause()
        return batch

    def _settle_pause(self) -> None:
        """Tells the engine if it should hear something new."""
        paused = self._held or self._pending_tokens >= self._pause_at_tokens
        if paused != self._paused and self._running:
            self._paused = paused
            self._send_pause(self.wire_id, paused)
