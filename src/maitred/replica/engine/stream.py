"""Token stream of one request: output that the connection has delivered and the reader has not yet taken.

The connection pushes and the reader pulls. Both run on one event loop, so there are no locks, and only the reader's own
wait ever awaits. Unread output is bounded twice. More tokens than `max_tokens` in each of `n` choices are a breach of
the protocol. Once `PAUSE_AT_TOKENS` are unread, the stream pauses the engine's work by itself until they are read;
after that, only output that was already on its way arrives.
"""

import asyncio
from collections.abc import Callable, Sequence

from maitred.core.errors import Bug, MaitredError, ProtocolViolation
from maitred.core.request import EngineRequest, TokenDelta

PAUSE_AT_TOKENS = 512
"""Default of the unread tokens at which a stream pauses: many seconds of text for a reader, a few kilobytes for us."""


class EngineStream:
    """Token stream of one request at an engine. Implements `core.replica.TokenStream`.

    Args:
        wire_id: Id of the request between connection and engine.
        request: The request; it says which choices, and how many tokens of each, may come.
        send_cancel: Tells the engine that a choice (or None: every choice that is left) is no longer wanted.
        send_pause: Tells the engine to pause the computation of the request (True) or to resume it.
        pause_at_tokens: Unread tokens at which the stream pauses by itself.
    """

    __slots__ = (
        "_cancelled_choices",
        "_engine_paused",
        "_failure",
        "_listener",
        "_pause_at_tokens",
        "_pause_requested",
        "_pending",
        "_pending_tokens",
        "_running_choices",
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
        self._running_choices = set(begun)
        self._tokens_left = request.sampling.max_tokens * len(begun) - sum(map(len, begun.values()))
        self._cancelled_choices: set[int] = set()
        self._pending: list[TokenDelta] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[Sequence[TokenDelta]], bool] | None = None
        self._send_cancel = send_cancel
        self._send_pause = send_pause
        self._pause_at_tokens = pause_at_tokens
        self._pending_tokens = 0
        self._pause_requested = False
        """Whether the reader has asked for a pause."""
        self._engine_paused = False
        """Whether the engine was last told to pause."""

    def __aiter__(self) -> "EngineStream":
        return self

    async def __anext__(self) -> list[TokenDelta]:
        """Returns everything that came since the last call, and waits if that is nothing.

        Raises:
            ReplicaLost: The connection has ended; what had arrived was handed out before.
            CallerError: The engine rejected the request; `ReplicaUnavailable` if another replica might take it.
            RuntimeError: Two tasks read one stream.
        """
        while not self._pending:
            if self._failure is not None:
                raise self._failure
            if not self._running_choices:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError("A token stream has one reader; another task is already waiting on this one.")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._take_pending()

    def listen(self, on_delta: Callable[[Sequence[TokenDelta]], bool]) -> None:
        """Offers each batch for which the reader waits to `on_delta` first. Implements `core.replica.TokenStream`."""
        self._listener = on_delta

    def cancel(self, index: int) -> None:
        """Ends one choice; its unread output is dropped."""
        self._pending = [delta for delta in self._pending if delta.index != index]
        if index in self._running_choices:
            self._running_choices.discard(index)
            self._cancelled_choices.add(index)
            self._send_cancel(self.wire_id, index)
            if not self._running_choices:
                self._wake_reader()
        self._pending_tokens = sum(len(delta.tokens) for delta in self._pending)
        self._sync_pause()

    def pause(self) -> None:
        """Pauses the engine's work on the request; output that is on its way still arrives."""
        self._pause_requested = True
        self._sync_pause()

    def resume(self) -> None:
        """Resumes the engine's work on the request, once no more than `pause_at_tokens` are unread."""
        self._pause_requested = False
        self._sync_pause()

    def push(self, delta: TokenDelta) -> None:
        """Adds a delta that the connection has received.

        This runs once for every token of every request. It does not wake the reader: see `wake`.

        Raises:
            ProtocolViolation: The choice does not exist or had already finished, or there are too many tokens.
        """
        index = delta.index
        if index not in self._running_choices:
            if index in self._cancelled_choices:
                return  # was on its way when the choice was cancelled
            raise ProtocolViolation(
                f"The engine sent tokens of choice {index} of {self.wire_id}, which is not running."
            )
        self._tokens_left -= len(delta.tokens)
        if self._tokens_left < 0:
            raise ProtocolViolation(f"The engine sent more tokens of {self.wire_id} than were asked for.")
        if delta.finish is not None:
            self._running_choices.discard(index)
        self._pending.append(delta)
        self._pending_tokens += len(delta.tokens)
        if self._pending_tokens >= self._pause_at_tokens:
            self._sync_pause()

    def wake(self) -> None:
        """Wakes a waiting reader for the pushed output, unless a listener takes the output instead."""
        if not self._pending or self._waiter is None or self._waiter.done():
            return
        if self._listener is not None:
            try:
                took_all = self._listener(self._pending)
            except Exception as error:  # an exception here would stop the reading of all streams' messages
                self._failure, took_all = error, False
                self._take_pending()
            if took_all:
                self._take_pending()
                if self._running_choices:
                    return  # the reader is woken for the end
        self._waiter.set_result(None)

    def fail(self, failure: MaitredError) -> None:
        """Ends the stream with an error, after what is pending. A stream that is complete stays complete."""
        if self._running_choices:
            self._running_choices.clear()
            self._failure = failure
            self._wake_reader()

    def close(self) -> None:
        """Closes the stream for its reader: choices that have not finished are cancelled, in one message."""
        if self._running_choices:
            self._running_choices.clear()
            self._send_cancel(self.wire_id, None)
        self._pending, self._listener = [], None
        # A read after this would look like a complete answer if it just ended.
        self._failure = self._failure or Bug("A token stream was read after its context was left.")
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take_pending(self) -> list[TokenDelta]:
        """Removes the pending output and returns it."""
        batch, self._pending = self._pending, []
        self._pending_tokens = 0
        if self._engine_paused:
            self._sync_pause()
        return batch

    def _sync_pause(self) -> None:
        """Tells the engine to pause or to resume if it was last told otherwise."""
        paused = self._pause_requested or self._pending_tokens >= self._pause_at_tokens
        if paused != self._engine_paused and self._running_choices:
            self._engine_paused = paused
            self._send_pause(self.wire_id, paused)
