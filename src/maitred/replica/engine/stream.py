"""Token stream of one request: a buffer between the connection and the task that reads the output.

The connection calls `push`, and the reader iterates over the stream. Both run on one event loop, so there are no locks,
and only `__anext__` awaits. Two limits bound the unread output. An engine that sends more than `n` times `max_tokens`
tokens violates the protocol. When `pause_at_tokens` tokens are unread, the stream tells the engine to pause the request
until they are read; only output in transit still arrives.
"""

import asyncio
from collections.abc import Callable, Sequence

from maitred.core.errors import Bug, MaitredError, ProtocolViolation
from maitred.core.request import EngineRequest, FinishReason, TokenDelta

PAUSE_AT_TOKENS = 512
"""Default number of unread tokens at which a stream pauses: seconds of text, but only a few kilobytes."""


class EngineStream:
    """Token stream of one request at an engine. Implements `core.replica.TokenStream`.

    Args:
        wire_id: Id of the request in the engine protocol, unique in the connection.
        request: The request; it determines the valid choices and the maximum number of tokens.
        send_cancel: Sends a cancellation of one choice; None: of all running choices.
        send_pause: Tells the engine to pause (True) or to resume (False) the request.
        pause_at_tokens: Number of unread tokens at which the stream pauses the request.

    Attributes:
        on_unread: See `core.replica.TokenStream`.
    """

    __slots__ = (
        "_cancelled_choices",
        "_counted_tokens",
        "_engine_paused",
        "_failure",
        "_is_closed",
        "_listener",
        "_pause_at_tokens",
        "_pause_requested",
        "_pending",
        "_pending_tokens",
        "_remaining_positions",
        "_remaining_tokens",
        "_running_choices",
        "_scoring_choice",
        "_send_cancel",
        "_send_pause",
        "_waiter",
        "on_unread",
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
        choice_count, resumes = request.sampling.n, request.resumes
        self._running_choices = set(range(choice_count) if resumes is None else resumes)
        self._remaining_tokens = request.sampling.max_tokens * len(self._running_choices)
        if resumes is not None:
            self._remaining_tokens -= sum(map(len, resumes.values()))
        # The first choice that runs brings the log-probabilities of the prompt, before its first token.
        self._scoring_choice = min(self._running_choices)
        self._remaining_positions = 0 if request.sampling.prompt_logprobs is None else len(request.prompt) - 1
        self._cancelled_choices: set[int] = set()
        self._pending: list[TokenDelta] = []
        self._failure: Exception | None = None
        self._is_closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[Sequence[TokenDelta]], bool] | None = None
        self._send_cancel = send_cancel
        self._send_pause = send_pause
        self._pause_at_tokens = pause_at_tokens
        self._pending_tokens = 0
        self.on_unread: Callable[[int], None] | None = None
        self._counted_tokens = 0
        """Unread tokens of which `on_unread` was told."""
        self._pause_requested = False
        """Whether `pause` was called, without `resume` since."""
        self._engine_paused = False
        """Whether the last message told the engine to pause."""

    def __aiter__(self) -> "EngineStream":
        return self

    async def __anext__(self) -> list[TokenDelta]:
        """Returns all deltas since the last call, and waits for the first one if there are none.

        Raises:
            ReplicaLost: The connection has ended; raised after all received deltas were returned.
            CallerError: The engine rejected the request; `ReplicaUnavailable` if another replica might take it.
            RuntimeError: Another task is already reading the stream.
        """
        while not self._pending:
            if self._failure is not None:
                raise self._failure
            if self._is_closed:
                # Without an error, this read would look like the end of a complete response.
                raise Bug("A token stream was read after its context was left.")
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
        """Sets a callback that gets each batch first; if it returns False, the reader gets the batch.

        Implements `core.replica.TokenStream`.
        """
        self._listener = on_delta

    def cancel(self, index: int) -> None:
        """Cancels one choice and drops its unread output."""
        self._pending = [delta for delta in self._pending if delta.index != index]
        if index in self._running_choices:
            self._running_choices.discard(index)
            self._cancelled_choices.add(index)
            self._send_cancel(self.wire_id, index)
            if not self._running_choices:
                self._wake_reader()
        self._pending_tokens = sum(len(delta.tokens) for delta in self._pending)
        self._counted_tokens = min(self._counted_tokens, self._pending_tokens)
        self._sync_pause()

    def pause(self) -> None:
        """Tells the engine to pause the request; output in transit still arrives."""
        self._pause_requested = True
        self._sync_pause()

    def resume(self) -> None:
        """Tells the engine to resume the request, as soon as fewer than `pause_at_tokens` tokens are unread."""
        self._pause_requested = False
        self._sync_pause()

    def push(self, delta: TokenDelta) -> None:
        """Adds a delta that the connection has received.

        This is a hot path: it runs for every token of every request. It does not wake the reader: see `wake`.

        Raises:
            ProtocolViolation: The choice does not exist or has finished, or the engine sent too many tokens, or too
                many or too few log-probabilities of the prompt.
        """
        index = delta.index
        if index not in self._running_choices:
            if index in self._cancelled_choices:
                return  # was in transit when the choice was cancelled
            raise ProtocolViolation(
                f"The engine sent tokens of choice {index} of {self.wire_id}, which is not running."
            )
        self._remaining_tokens -= len(delta.tokens)
        if self._remaining_tokens < 0:
            raise ProtocolViolation(f"The engine sent more tokens of {self.wire_id} than were asked for.")
        if self._remaining_positions or delta.prompt_logprobs is not None:
            self._count_positions(delta)
        if delta.finish is not None:
            self._running_choices.discard(index)
        self._pending.append(delta)
        self._pending_tokens += len(delta.tokens)
        if self._pending_tokens >= self._pause_at_tokens:
            self._sync_pause()

    def _count_positions(self, delta: TokenDelta) -> None:
        """Counts the prompt tokens whose log-probabilities a delta has."""
        if delta.prompt_logprobs is not None:
            self._remaining_positions -= delta.prompt_logprobs.count
        is_answer = bool(delta.tokens) or delta.finish in (FinishReason.STOP, FinishReason.LENGTH)
        is_late = self._remaining_positions > 0 and is_answer and delta.index == self._scoring_choice
        if self._remaining_positions < 0 or is_late:
            amount = "too few" if is_late else "too many"
            raise ProtocolViolation(f"The engine sent log-probabilities for {amount} prompt tokens of {self.wire_id}.")

    def wake(self) -> None:
        """Passes the pushed output to the listener, or wakes the reader if the listener does not handle it."""
        if not self._pending or self._waiter is None or self._waiter.done():
            if self.on_unread is not None and self._pending_tokens > self._counted_tokens:
                unread, self._counted_tokens = self._pending_tokens - self._counted_tokens, self._pending_tokens
                self.on_unread(unread)
            return
        if self._listener is not None:
            try:
                is_handled = self._listener(self._pending)
            except Exception as error:
                # In `data_received`, an exception would break the connection, and so all its streams.
                self._failure, is_handled = error, False
                self._take_pending()
            if is_handled:
                self._take_pending()
                if self._running_choices:
                    return  # the reader is woken only at the end of the stream
        self._waiter.set_result(None)

    def fail(self, failure: MaitredError) -> None:
        """Ends the stream with an error, which is raised after the pending output was read.

        It does nothing if the stream is complete.
        """
        if self._running_choices:
            self._running_choices.clear()
            self._failure = failure
            self._wake_reader()

    def close(self) -> None:
        """Closes the stream, and cancels all running choices with one message."""
        if self._running_choices:
            self._running_choices.clear()
            self._send_cancel(self.wire_id, None)
        self._pending, self._listener = [], None
        self._is_closed = True
        if self._waiter is not None:
            self._wake_reader()

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take_pending(self) -> list[TokenDelta]:
        """Removes the pending output and returns it."""
        batch, self._pending = self._pending, []
        self._pending_tokens = self._counted_tokens = 0
        if self._engine_paused:
            self._sync_pause()
        return batch

    def _sync_pause(self) -> None:
        """Tells the engine to pause or to resume, if the last message was the opposite."""
        paused = self._pause_requested or self._pending_tokens >= self._pause_at_tokens
        if paused != self._engine_paused and self._running_choices:
            self._engine_paused = paused
            self._send_pause(self.wire_id, paused)
