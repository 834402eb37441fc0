"""Request coalescing: callers who ask the same while the answer is being made share one answer.

The answer is computed in a task of its own, and every caller, the first one too, reads what the task has got so far,
and then what comes. So a caller that leaves cancels nothing but its own reading; when the last one leaves, the task
ends, and with it the work at the replica. The task holds the reservation of the caller who began it.

Reading does not slow down the others: an answer waits for its readers only when all of them are behind.

What computes an answer can be lost while callers read it: another process that dies, or the right of the first caller
to use the gateway. Then another one computes it again, with a reservation of its own, and what the readers have already
is compared with it and left out.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from maitred.app.request.answer_comparison import AnswerComparison
from maitred.app.request.answer_lookup import AnswerLookup, AnswerRecording
from maitred.app.request.flow_control import GrantHandle
from maitred.app.request.response import ContinuableResponse
from maitred.core.context import CacheStatus, Outcome, RequestContext
from maitred.core.errors import Bug, MaitredError, ReplicaLost, Unauthenticated
from maitred.core.inference import AnswerPrefix, TextDelta
from maitred.core.request import Usage
from maitred.core.resource_stack import ResourceStack
from maitred.core.service import PushStream, ResponseStream, StreamSink

_MOST_UNREAD = 64
"""Batches by which every reader is behind when the answer waits for one of them."""

Compute = Callable[[ResourceStack], Awaitable[ResponseStream]]
"""Plans, admits and enqueues the request; the stack owns what it holds."""
Recover = Callable[["CoalescedAnswer", MaitredError], Awaitable[Compute]]
"""Returns what goes on with an answer whose computation is lost; raises if nothing does."""


class PeerLost(ReplicaLost):
    """The process that computed the answer has ended, or does not compute it any more."""


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
        is_remote: Whether another process computes it.

    Attributes:
        context: See above; once the answer has ended, a copy of the record at that time, because its caller goes on.
        next_context: The same of who computes it again, until that has come as far as the readers are; None: nobody.
        recoveries: How often the computation was lost and something else went on with it.
        is_lost: Whether the answer has failed because nothing goes on with it here.
        has_started: Whether the request is admitted.
        has_begun: Whether a part of the answer has come.
        continues_at_fallback: Whether another model may continue it if it breaks off, once the request is admitted.
        prefix: The part that has come of an answer that has failed, for another model to continue; None: it cannot be.
        is_over: Whether no more comes.
        failure: The error with which it has ended; None: it is complete, or goes on.
    """

    def __init__(
        self, context: RequestContext, recording: AnswerRecording, choices: int, *, is_remote: bool = False
    ) -> None:
        self.context = context
        self.next_context: RequestContext | None = None
        self.recoveries = 0
        self.is_lost = self.has_started = self.has_begun = self.continues_at_fallback = False
        self._response: ResponseStream | None = None
        """What computes it; None before the request is admitted, and behind its end."""
        self.prefix: AnswerPrefix | None = None
        self._recording = recording
        self._unfinished = choices
        self._recover: Recover | None = None
        self._is_remote = is_remote
        self._is_ending = False
        """Whether the work has failed or nobody reads it, so that only what it holds is still released."""
        self._readers: list[AnswerReader] = []
        self._task: asyncio.Task[None] | None = None
        self._reader_waiter: asyncio.Future[None] | None = None
        """Future of the task while it waits for a reader."""
        self.failure: BaseException | None = None
        self.is_over = False

    def start(self, compute: Compute, on_end: Callable[[object], None], recover: Recover | None = None) -> None:
        """Starts the task that computes the answer.

        Args:
            compute: Begins the answer.
            on_end: Called when the answer is in the cache, or will never be.
            recover: Finds what goes on with the answer if its computation is lost; None: nothing does.
        """
        self._recover = recover
        name = f"answer to {self.context.request_id}"
        self._task = asyncio.get_running_loop().create_task(self._run(compute, on_end), name=name)

    @property
    def can_be_joined(self) -> bool:
        """Whether a new reader gets the whole answer, as if it had been computed for this reader.

        It does not if the load or limits of the first caller have made it shorter, if another model gives it, or if it
        is that of a similar question, which not every caller may get.
        """
        context = self.context
        as_asked = not context.degraded and context.clamped_max_tokens is None
        as_asked = as_asked and (context.cache is None or context.cache.status is not CacheStatus.SEMANTIC)
        return as_asked and not self._is_ending and self.failure is None and not self._recording.given_up

    @property
    def is_complete(self) -> bool:
        """Whether all of it has come."""
        return not self._unfinished

    def attach(self, reader: AnswerReader) -> list[TextDelta]:
        """Adds a reader; returns the answer so far."""
        self._readers.append(reader)
        self.on_read()
        return self._recording.deltas() if self.has_begun else []

    async def detach(self, reader: AnswerReader, error: BaseException | None) -> None:
        """Removes a reader; behind the last one, ends the task and waits until it holds nothing any more."""
        self._readers.remove(reader)
        self.on_read()
        task = self._task
        if isinstance(reader, CoalescedResponse) and self.is_computed_for(context := reader.context):
            # The answer may go on for others. Its line in the ledger must not wait for a response that nobody stores,
            # and its request is reported when all tokens are known.
            context.stored_as = ""
            if self._readers and self._unfinished and task is not None:
                context.on_work_end = task.add_done_callback
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
            while True:
                try:
                    async with ResourceStack() as stack:
                        try:
                            self._response = await compute(stack)
                            await self._read(self._response)
                        except BaseException:
                            self._is_ending = True
                            raise
                    break
                except (PeerLost, Unauthenticated) as lost:
                    if self._is_remote and not self._unfinished:
                        break  # only the word that it is complete was lost
                    is_over = isinstance(lost, PeerLost) and not self._is_remote
                    if is_over or self._recover is None or not (self.has_started and self._readers):
                        raise
                    compute = await self._recover(self, lost)
                    self.recoveries += 1
                    self._is_ending = False
            if not self._is_remote:
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
        if not self.has_started:
            self.has_started = True
            self.continues_at_fallback = isinstance(response, ContinuableResponse) and response.continues_at_fallback
            for reader in self._readers:
                reader.on_start()
        batches = aiter(response)
        if self.has_begun:
            batches = self._rest_of(response)
        else:
            if self.next_context is not None:
                self._change_context()
            if isinstance(response, PushStream):
                response.push_to(self)
        async for parts in batches:
            for part in parts:
                if part.finish is not None:
                    self._unfinished -= 1
            if not self._unfinished:
                # Behind the last part, the first caller may begin another answer with the same record.
                self.context = replace(self.context)
            self.send(parts)
            while self._readers and self._readers[0].unread >= _MOST_UNREAD and not self.open:
                self._reader_waiter = asyncio.get_running_loop().create_future()
                await self._reader_waiter

    async def _rest_of(self, response: ResponseStream) -> AsyncIterator[list[TextDelta]]:
        """Yields what comes of a response behind what the readers have already.

        Raises:
            ReplicaLost: It is another answer than the one that the readers have, or they have too much to compare.
        """
        if self._recording.given_up:
            raise ReplicaLost
        comparison: AnswerComparison | None = AnswerComparison(self._recording.deltas())
        async for parts in aiter(response):
            rest = parts if comparison is None else comparison.rest(parts)
            if comparison is not None and comparison.is_over:
                comparison = None
                self._change_context()
                if isinstance(response, PushStream):
                    response.push_to(self)
            if rest:
                yield rest
        if comparison is not None:
            raise ReplicaLost

    def _change_context(self) -> None:
        """Notes that what computes the answer again has come as far as the readers are."""
        assert self.next_context is not None
        self.context, self.next_context = self.next_context, None

    def is_computed_for(self, context: RequestContext) -> bool:
        """Returns whether the answer is computed for the request of a record."""
        return context is self.context or context is self.next_context

    async def compute_for_next(self, stack: ResourceStack) -> ResponseStream:
        """Computes the answer again for the first reader that is admitted; implements `Compute`.

        A reader that is not admitted fails with the reason; the others go on.

        Raises:
            PeerLost: No reader of this process is admitted.
        """
        self._is_remote = False
        for reader in [*self._readers]:
            if reader in self._readers and isinstance(reader, CoalescedResponse) and reader.grant is not None:
                try:
                    async with ResourceStack() as taken:
                        response = await reader.compute_again(taken)
                        stack.push_async_exit(taken.pop_all())
                except MaitredError as refusal:
                    reader.fail(refusal)
                else:
                    return response
        raise PeerLost

    def fail_first(self, failure: MaitredError) -> None:
        """Ends the answer for the caller for whom it was computed; the others go on."""
        for reader in self._readers:
            if isinstance(reader, CoalescedResponse) and self.is_computed_for(reader.context):
                reader.fail(failure)

    def _end(self, failure: BaseException | None) -> None:
        if isinstance(failure, asyncio.CancelledError):
            reason = failure.args[0] if failure.args else None
            failure = reason if isinstance(reason, MaitredError) else ReplicaLost()
        if isinstance(failure, PeerLost):
            self.is_lost, failure = True, ReplicaLost()
        if self._unfinished:
            self.context = replace(self.context)
        self.next_context = None
        response, self._response = self._response, None  # whose sink this is
        if failure is not None and isinstance(response, ContinuableResponse):
            self.prefix = response.prefix
        self.failure, self.is_over = failure, True
        for reader in self._readers:
            reader.on_end(failure)

    def on_read(self) -> None:
        """Lets the task go on if it has waited for a reader that has read, has come, or has left."""
        if self._reader_waiter is not None and not self._reader_waiter.done() and (self.open or not self._readers):
            self._reader_waiter.set_result(None)

    def raise_if_over(self, failure: BaseException | None) -> None:
        """Raises how the answer has ended: its failure, or StopAsyncIteration; does nothing while it goes on.

        Each reader gets a failure of its own, because who handles it writes into it.

        Args:
            failure: Failure of the reader alone; None: it has none.
        """
        failure = failure or self.failure
        if failure is not None:
            own = failure.__class__.__new__(failure.__class__, *failure.args)
            own.__dict__.update(failure.__dict__)
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
        compute: Computes the answer for this caller.

    Attributes:
        context: See above.
        grant: Reservation of this caller; None: the caller for whom the answer is computed, whose reservation the
            answer holds.
    """

    def __init__(
        self, answer: CoalescedAnswer, context: RequestContext, lookup: AnswerLookup, compute: Compute
    ) -> None:
        self._answer = answer
        self._lookup = lookup
        self.context = context
        self._compute = compute
        self._failure: MaitredError | None = None
        """Failure of this caller alone."""
        self._prompt_tokens = context.prompt_tokens
        self._unfinished = lookup.choices
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
        await self._answer.detach(self, error)

    async def __anext__(self) -> list[TextDelta]:
        if not self._unfinished:
            raise StopAsyncIteration
        while not self.unread:
            self._answer.raise_if_over(self._failure)
            await self._wait()
        parts, self._unread, self.unread = self._unread, [], 0
        self._answer.on_read()
        for part in parts:
            if part.finish is not None:
                self._unfinished -= 1
        if self.grant is not None:
            self._lookup.restore(self._answer.context, self.context)
            if not self._unfinished:
                await self.grant.settle(self.context.usage, Outcome.FINISHED)
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

        It sends them at once where they are text alone and the reader waits, and keeps them otherwise. Who wants the
        whole answer is not woken for each part of it.
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
        if self._lookup.is_whole and self.unread < _MOST_UNREAD // 2:
            for part in parts:
                if part.finish is not None:
                    break
            else:
                return
        self._wake()

    async def wait_started(self) -> None:
        """Waits until the request is admitted.

        Raises:
            MaitredError: It was rejected.
        """
        while not self._answer.has_started:
            self._answer.raise_if_over(self._failure)
            await self._wait()
        self.continues_at_fallback = self._answer.continues_at_fallback

    def on_start(self) -> None:
        """Wakes the reader, because the request is admitted; implements `AnswerReader.on_start`."""
        self._wake()

    def on_end(self, failure: BaseException | None) -> None:
        """Wakes the reader, because no more deltas come; implements `AnswerReader.on_end`."""
        self._wake()

    def fail(self, failure: MaitredError) -> None:
        """Ends the answer for this caller alone."""
        self._failure = failure
        self._wake()

    async def compute_again(self, stack: ResourceStack) -> ResponseStream:
        """Computes the answer again for this caller, whose reservation for an answer of somebody else ends.

        Args:
            stack: Owns what the computation holds.

        Raises:
            MaitredError: The caller is not admitted.
        """
        grant, self.grant = self.grant, None
        assert grant is not None
        await grant.settle(Usage(0, 0), Outcome.FAILED)
        context = self.context
        context.is_counted = True  # the rates of requests have it
        context.set_usage(Usage(self._prompt_tokens, 0))
        context.finish_reasons = []
        self._lookup.note(CacheStatus.MISS, context)
        response = await self._compute(stack)
        if context.degraded or context.clamped_max_tokens is not None:
            raise ReplicaLost  # it would be another answer
        self._answer.next_context = context
        return response

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self.grant is not None:
                self._lookup.restore(self._answer.context, self.context)  # also of what went to the sink

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
