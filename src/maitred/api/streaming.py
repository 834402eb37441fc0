"""Sends answers in the format of any API, as whole responses or as streams with a heartbeat.

The status line of a stream is sent when the replica's first output arrives. Until then, a failure can still be answered
with a 502 or 503, which clients retry by themselves; and the delay costs nothing, because no token exists yet. Only if
this takes so long that a proxy might give up does the stream start earlier, with comments that every reader of event
streams skips (see `StreamHeartbeat`).

**Heartbeat.** Proxies and clients give up on a connection without data: while a request waits in the queue, and while
its sequence is preempted from the batch. Comments, which every reader of event streams skips, keep the connection open.
Before the first token they also give the queue position of the request.

The heartbeat must not slow down tokens, so a timer checks from time to time when something was last sent, and acts only
if nothing was sent.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from maitred.api.exchange import HttpExchange
from maitred.core.cohort import COHORT, CohortStage
from maitred.core.context import RequestContext
from maitred.core.flow import QueuePosition
from maitred.core.inference import ChunkMetadata, PromptScores, TextDelta, TokenScore
from maitred.core.request import FinishReason, Usage
from maitred.core.service import PushStream, ResponseStream
from maitred.wire.openai.written import merge_metadata
from maitred.wire.sse import encode_comment


class StreamHeartbeat:
    """Sends a comment on a stream whenever nothing was sent for a while, until its block ends.

    The first comment also sends the status line, if it was not sent yet.

    Args:
        exchange: The exchange of the stream.
        every_s: The longest time in seconds without data.
    """

    def __init__(self, exchange: HttpExchange, every_s: float) -> None:
        self._exchange = exchange
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._entered_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._entered_s = time.monotonic()
        self._timer = self._loop.call_later(self._every_s, self._beat)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])

    def _beat(self) -> None:
        quiet_s = time.monotonic() - max(self._exchange.sent_s, self._entered_s)
        left_s = self._every_s - quiet_s
        # The clock of the event loop's timers can be slightly behind.
        if left_s > 0.001 * self._every_s:
            self._timer = self._loop.call_later(left_s, self._beat)
            return
        self._timer = self._loop.call_later(self._every_s, self._beat)
        # While a write waits for the client, the client still has unread data, so no heartbeat is needed.
        if self._exchange.connection.writable and (self._sending is None or self._sending.done()):
            self._sending = self._loop.create_task(
                self._exchange.send_comment(encode_comment(sign_of_life(self._exchange.context)))
            )


def sign_of_life(context: RequestContext) -> str:
    """Makes the text of a heartbeat comment: the queue position of the request, if it is known."""
    position = None if context.position is None else context.position()
    if position is not None:
        return queue_comment(position)
    return "waiting for the first token" if context.first_token_s is None else "waiting for the next token"


def queue_comment(position: QueuePosition) -> str:
    """Returns a queue position as text."""
    return f"queue position {position.position}, predicted wait {round(position.wait_s * 1000)} ms"


@dataclass(slots=True)
class CollectedChoice:
    """One choice of an answer, collected from its deltas."""

    text: list[str] = field(default_factory=list)
    scores: list[TokenScore] | None = None
    extras: list[dict[str, Any]] = field(default_factory=list)
    finish: FinishReason = FinishReason.LENGTH
    stop: str | int | None = None
    metadata: list[ChunkMetadata] = field(default_factory=list)
    token_ids: list[int] | None = None
    prompt_scores: PromptScores | None = None

    @property
    def plain(self) -> bool:
        """Whether the choice consists of text alone."""
        has_others = self.extras or self.metadata or self.token_ids is not None or self.prompt_scores is not None
        has_others = has_others or self.stop is not None
        return self.scores is None and not has_others and self.finish is not FinishReason.DEADLINE

    def whole_metadata(self) -> ChunkMetadata:
        """Returns the members around the whole choice."""
        return ChunkMetadata(
            merge_metadata(entry.chunk for entry in self.metadata),
            merge_metadata(entry.choice for entry in self.metadata),
        )

    def add(self, part: TextDelta) -> None:
        """Appends a delta to the choice."""
        self.text.append(part.text)
        if part.scores is not None:
            if self.scores is None:
                self.scores = []
            self.scores.extend(part.scores)
        if part.extra is not None:
            self.extras.append(part.extra)
        if part.metadata is not None:
            self.metadata.append(part.metadata)
        if part.token_ids is not None:
            if self.token_ids is None:
                self.token_ids = []
            self.token_ids += part.token_ids
        if part.prompt_scores is not None:
            self.prompt_scores = part.prompt_scores
        if part.finish is not None:
            self.finish, self.stop = part.finish, part.stop


class ResponseFormatter(Protocol):
    """Writes one answer in the format of one API."""

    def start(self) -> bytes:
        """Returns the events before any text; called once the replica has begun to answer."""
        ...

    def events(self, parts: Sequence[TextDelta]) -> bytes:
        """Encodes these deltas as events."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Returns the events after all text."""
        ...

    def whole(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        """Returns the whole answer as one body."""
        ...


BeforeEnd = Callable[[Sequence[CollectedChoice]], Awaitable[None]]
"""Called with the choices of a whole answer, or with nothing for a stream, before the client gets the end."""


async def send_response(
    exchange: HttpExchange,
    answer: ResponseStream,
    shape: ResponseFormatter,
    *,
    choices: int,
    streams: bool,
    heartbeat_s: float,
    before_end: BeforeEnd | None = None,
) -> None:
    """Sends the answer to the client.

    Args:
        exchange: The exchange of the request.
        answer: The answer.
        shape: Writes the answer in the format of the API.
        choices: Number of choices.
        streams: Whether the client wants a stream.
        heartbeat_s: Longest time in seconds without an event on a stream.
        before_end: Called when all of the answer is known, before the client gets the end of it, with the choices of
            a whole answer or with nothing.

    Raises:
        ReplicaLost: The answer is incomplete. The caller must abort a stream that has begun instead of ending it
            normally.
    """
    if streams:
        await _stream(exchange, answer, shape, heartbeat_s, before_end)
        return
    collected = [CollectedChoice() for _ in range(choices)]
    # A `PushStream` whose choices are all complete needs no further read; a wrapper around an answer may need to see
    # the end.
    unfinished = choices if isinstance(answer, PushStream) else math.inf
    async for parts in answer:
        for part in parts:
            bare = part.finish is None and part.scores is None and part.extra is None and part.metadata is None
            if bare and part.token_ids is None and part.prompt_scores is None:
                collected[part.index].text.append(part.text)  # most deltas are only text
            else:
                collected[part.index].add(part)
                unfinished -= part.finish is not None
        if not unfinished:
            break
    await COHORT.sync(CohortStage.SETTLED)
    if before_end is not None:
        await before_end(collected)
    await exchange.respond(shape.whole(collected, exchange.context.usage))
    await COHORT.sync(CohortStage.SENT)


class _ExchangeSink:
    """Sink of a stream that has begun, which implements `core.service.StreamSink`."""

    def __init__(self, exchange: HttpExchange, shape: ResponseFormatter) -> None:
        self._exchange = exchange
        self._formatter = shape

    @property
    def open(self) -> bool:
        return self._exchange.ready

    def send(self, parts: Sequence[TextDelta]) -> None:
        if events := self._formatter.events(parts):
            self._exchange.write(events)


async def _stream(
    exchange: HttpExchange,
    answer: ResponseStream,
    shape: ResponseFormatter,
    heartbeat_s: float,
    before_end: BeforeEnd | None,
) -> None:
    """Sends one write per batch of deltas: a slow client gets fewer, larger writes and delays only itself."""
    async with StreamHeartbeat(exchange, heartbeat_s):
        batches = aiter(answer)
        first = await anext(batches)
        await exchange.stream(shape.start() + shape.events(first))
        if isinstance(answer, PushStream):
            answer.push_to(_ExchangeSink(exchange, shape))
        async for parts in batches:
            if events := shape.events(parts):
                await exchange.stream(events)
        if before_end is not None:
            await before_end(())
    await COHORT.sync(CohortStage.SETTLED)
    await exchange.finish(shape.end(exchange.context.usage))
    await COHORT.sync(CohortStage.SENT)
