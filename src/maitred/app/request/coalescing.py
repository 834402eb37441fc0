"""Request coalescing: callers who ask the same while the answer is being made share one answer.

The answer is computed in a task of its own, and every caller, the first one too, reads what the task has got so far,
and then what comes. So a caller that leaves cancels nothing but its own reading; when the last one leaves, the task
ends, and with it the work at the replica. The task holds the reservation of the caller who began it.

Reading does not slow down the others: an answer waits for its readers only when all of them are behind.
"""

import asyncio
import copy
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from maitred.app.request.answer_lookup import AnswerLookup, AnswerRecording
from maitred.app.request.flow_control import GrantHandle
from maitred.app.request.response import ContinuableResponse
from maitred.core.context import Outcome, RequestContext
from maitred.core.errors import Bug, MaitredError, ReplicaLost
from maitred.core.inference import AnswerPrefix, TextDelta
from maitred.core.resource_stack import ResourceStack
from maitred.core.service import PushStream, ResponseStream, StreamSink

_MOST_UNREAD = 64
"""Batches by which every reader is behind when the answer waits for one of them."""

Compute = Callable[[ResourceStack], Awaitable[ResponseStream]]
"""Plans, admits and enqueues the request; the stack owns what it holds."""


class AnswerReader(ABC):
    """Reader of a coalesced answer.

    Attributes:
        unread: Number of batches that have come and are not read.
    """

    unread = 0

    @abstractmethod
    def on_start(self) -> None:
        """Notes that the request is admitted."""
        ...

    @abstractmethod
    def take(self, parts: Sequence[TextDelta]) -> None:
        """Takes the next deltas."""
        ...

    @abstractmethod
    def on_end(self, failure: BaseException | None) -> None:
        """Notes that no more deltas come: the answer is complete, or has failed."""
        ...


class CoalescedAnswer(StreamSink):
    """Answer that is being computed for all who ask for it.

    Args:
        context: Record of the request of the caller who began it.
        recording: Records the answer, for callers who come later and for the cache.
        choices: Number of choices of the answer.

    Attributes:
        context: See above; once the answer has ended, a copy of the record at that time, because its caller goes on.
        has_started: Whether the request is admitted.
        has_begun: Whether a part of the answer has come.
        response: What computes it, once the request is admitted.
        prefix: The part that has come of an answer that has failed, for another model to continue; None: it cannot be.
        is_over: Whether no more comes.
        failure: The error with which it has ended; None: it is complete, or goes on.
    """

    def __init__(self, context: RequestContext, recording: AnswerRecording, choices: int) -> None:
        self.context = context
        self.has_started = self.has_begun = False
        self.response: ResponseStream | None = None
        self.prefix: AnswerPrefix | None = None
        self._recording = recording
        self._unfinished = choices
        self._is_ending = False
        """Whether the work has failed or nobody reads it, so that only what it holds is still released."""
        self._readers: list[AnswerReader] = []
        self._task: asyncio.Task[None] | None = None
        self._reader_waiter: asyncio.Future[None] | None = None
        """Future of the task while it waits for a reader."""
        self.failure: BaseException | None = None
        self.is_over = False

    def start(self, compute: Compute, on_end: Callable[[object], None]) -> None:
        """Starts the task that computes the answer.

        Args:
            compute: Begins the answer.
            on_end: Called when the answer is in the cache, or will never be.
        """
        self._task = asyncio.create_task(self._run(compute, on_end), name=f"answer to {self.context.request_id}")

    @property
    def can_be_joined(self) -> bool:
        """Whether a new reader gets the whole answer, as if it had been computed for this reader.

        It does not if the load or limits of the first caller have made it shorter, or another model gives it.
        """
        context = self.context
        as_asked = not context.degraded and context.clamped_max_tokens is None
        return as_asked and not self._is_ending and self.failure is None and not self._recording.given_up

    def attach(self, reader: AnswerReader) -> list[TextDelta]:
        """Adds a reader; returns the answer so far."""
        self._readers.append(reader)
        self.on_read()
        return self._recording.deltas()

    async def detach(self, reader: AnswerReader, error: BaseException | None) -> None:
        """Removes a reader; behind the last one, ends the task and waits until it holds nothing any more."""
        self._readers.remove(reader)
        self.on_read()
        task = self._task
        if self._readers or task is None or task.done():
            return
        if self._unfinished:
            self._is_ending = True
            if isinstance(error, asyncio.CancelledError):
                task.cancel(*error.args)
            else:
                # Anything but a caller that leaves, or an error that has a name, is a fault of this program.
                task.cancel(*(() if error is None else (error if isinstance(error, MaitredError) else Bug(),)))
        await asyncio.wait([task])

    # --- the sink of the response ---

    @property
    def open(self) -> bool:
        """Whether a reader keeps up. Implements `StreamSink.open`."""
        for reader in self._readers:  # noqa: SIM110 - asked for every token, and a generator takes three times as long
            if reader.unread < _MOST_UNREAD:
                return True
        return False

    def send(self, parts: Sequence[TextDelta]) -> None:
        """Passes deltas on to all readers. Implements `StreamSink.send`."""
        self.has_begun = True
        self._recording.add(parts)
        for reader in self._readers:
            reader.take(parts)

    # --- the task ---

    async def _run(self, compute: Compute, on_end: Callable[[object], None]) -> None:
        stored: asyncio.Task[None] | None = None
        try:
            async with ResourceStack() as stack:
                try:
                    self.response = await compute(stack)
                    await self._read(self.response)
                except BaseException:
                    self._is_ending = True
                    raise
            stored = self._recording.finish(self.context)
        except BaseException as failure:
            self._end(failure)
            if not isinstance(failure, MaitredError | asyncio.CancelledError):
                raise
        else:
            self._end(None)
        finally:
            if stored is None:
                on_end(None)
            else:
                stored.add_done_callback(on_end)

    async def _read(self, response: ResponseStream) -> None:
        """Passes on what comes of the response."""
        self.has_started = True
        for reader in self._readers:
            reader.on_start()
        batches = aiter(response)
        if isinstance(response, PushStream):
            response.push_to(self)
        async for parts in batches:
            for part in parts:
                if part.finish is not None:
                    self._unfinished -= 1
            if not self._unfinished:
                # Behind the last part, the first caller may begin another answer with the same record.
                self.context = copy.copy(self.context)
            self.send(parts)
            while self._readers and self._readers[0].unread >= _MOST_UNREAD and not self.open:
                self._reader_waiter = asyncio.get_running_loop().create_future()
                await self._reader_waiter

    def _end(self, failure: BaseException | None) -> None:
        if isinstance(failure, asyncio.CancelledError):
            reason = failure.args[0] if failure.args else None
            failure = reason if isinstance(reason, MaitredError) else ReplicaLost()
        if self._unfinished:
            self.context = copy.copy(self.context)
        if failure is not None and isinstance(self.response, ContinuableResponse):
            self.prefix = self.response.prefix
        self.failure, self.is_over = failure, True
        for reader in self._readers:
            reader.on_end(failure)

    def on_read(self) -> None:
        """Lets the task go on if it has waited for a reader that has read, has come, or has left."""
        if self._reader_waiter is not None and not self._reader_waiter.done() and (self.open or not self._readers):
            self._reader_waiter.set_result(None)

    def raise_if_over(self) -> None:
        """Raises how the answer has ended: its failure, or StopAsyncIteration; does nothing while it goes on.

        Each reader gets a failure of its own, because who handles it writes into it.
        """
        if self.failure is not None:
            own = self.failure.__class__.__new__(self.failure.__class__, *self.failure.args)
            own.__dict__.update(self.failure.__dict__)
            raise own
        if self.is_over:
            raise StopAsyncIteration


class CoalescedResponse(ContinuableResponse, AnswerReader):
    """Response of one caller from a coalesced answer. Implements `maitred.core.service.ResponseStream`.

    Its stack closes it; then the caller is no reader of the answer any more.

    Args:
        answer: The answer.
        context: Record of the request of this caller.
        lookup: Look-up of the request.
        choices: Number of choices of the answer.

    Attributes:
        grant: Reservation of this caller; None: the caller who began the answer, whose reservation the answer holds.
    """

    def __init__(self, answer: CoalescedAnswer, context: RequestContext, lookup: AnswerLookup, choices: int) -> None:
        self._answer = answer
        self._lookup = lookup
        self._context = context
        self._unfinished = choices
        self._sink: StreamSink | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.grant: GrantHandle | None = None
        self._unread = answer.attach(self)
        self.unread = int(answer.has_begun)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._context is self._answer.context:
            # The answer may go on for others. Its line in the ledger must not wait for a response that nobody stores.
            self._context.stored_as = ""
        await self._answer.detach(self, error)

    async def __anext__(self) -> list[TextDelta]:
        if not self._unfinished:
            raise StopAsyncIteration
        while not self.unread:
            self._answer.raise_if_over()
            await self._wait()
        parts, self._unread, self.unread = self._unread, [], 0
        self._answer.on_read()
        for part in parts:
            if part.finish is not None:
                self._unfinished -= 1
        if self.grant is not None:
            self._lookup.restore(self._answer.context, self._context)
            if not self._unfinished:
                await self.grant.settle(self._context.usage, Outcome.FINISHED)
        return parts

    @property
    def prefix(self) -> AnswerPrefix | None:
        """The part that the caller has, as of the answer when it failed."""
        return self._answer.prefix

    def push_to(self, sink: StreamSink) -> None:
        """Pushes deltas to a sink as they come; implements `PushStream.push_to`."""
        self._sink = sink

    def take(self, parts: Sequence[TextDelta]) -> None:
        """Takes the next deltas; implements `AnswerReader.take`.

        It sends them at once where they are text alone and the reader waits, and keeps them otherwise.
        """
        sink = self._sink
        if sink is not None and self._waiter is not None and not self.unread and sink.open:
            for part in parts:
                if not part.plain:
                    break
            else:
                sink.send(parts)
                return
        self._unread += parts
        self.unread += 1
        self._wake()

    async def wait_started(self) -> None:
        """Waits until the request is admitted.

        Raises:
            MaitredError: It was rejected.
        """
        while not self._answer.has_started:
            self._answer.raise_if_over()
            await self._wait()
        response = self._answer.response
        self.continues_at_fallback = isinstance(response, ContinuableResponse) and response.continues_at_fallback

    def on_start(self) -> None:
        """Wakes the reader, because the request is admitted; implements `AnswerReader.on_start`."""
        self._wake()

    def on_end(self, failure: BaseException | None) -> None:
        """Wakes the reader, because no more deltas come; implements `AnswerReader.on_end`."""
        self._wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self.grant is not None:
                self._lookup.restore(self._answer.context, self._context)  # also of what went to the sink

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
