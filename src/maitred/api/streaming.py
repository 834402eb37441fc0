"""Sending of an answer, whole or as a stream with a heartbeat, whatever the API's shape.

The status line of a stream waits for the replica's first sign of life. Up to then a failure is an honest 502 or 503,
which clients retry by themselves; and nothing is lost by waiting, because there is nothing to show before the first
token. Only when that takes so long that a proxy on the way might give up does the stream begin without it, with
comments that every reader of event streams skips (see `StreamHeartbeat`).

**Heartbeat.** Proxies and clients give up on a connection that is silent for long: while a request waits in the queue,
and again when its sequence has lost its place in the batch for a while. Comments, which every reader of event streams
skips, keep it open. Before the first token they also tell where the request stands.

A token must not pay for this, so a timer looks now and then at when something was last sent, and nothing is touched
where something was.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from maitred.api.exchange import HttpExchange
from maitred.core.cohort import COHORT, CohortStage
from maitred.core.context import RequestContext
from maitred.core.flow import QueuePosition
from maitred.core.inference import TextDelta, TokenScore
from maitred.core.request import FinishReason, Usage
from maitred.core.service import PushStream, ResponseStream
from maitred.wire.sse import encode_comment


class StreamHeartbeat:
    """Sends a comment on a stream whenever nothing was sent for a while, as long as its block runs.

    The first comment sends the status line, if it has not gone out yet.

    Args:
        exchange: The stream's.
        every_s: The longest silence.
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
        # The clock that timers go by can be a hair behind.
        if left_s > 0.001 * self._every_s:
            self._timer = self._loop.call_later(left_s, self._beat)
            return
        self._timer = self._loop.call_later(self._every_s, self._beat)
        # While a write waits for the client, there is more to read than it reads.
        if self._exchange.connection.writable and (self._sending is None or self._sending.done()):
            self._sending = self._loop.create_task(
                self._exchange.send_comment(encode_comment(sign_of_life(self._exchange.context)))
            )


def sign_of_life(context: RequestContext) -> str:
    """Makes the comment of a heartbeat: where the request stands, as far as that is known."""
    position = None if context.position is None else context.position()
    if position is not None:
        return queue_comment(position)
    return "waiting for the first token" if context.first_token_s is None else "waiting for the next token"


def queue_comment(position: QueuePosition) -> str:
    """A place in the queue, in words."""
    return f"queue position {position.position}, predicted wait {round(position.wait_s * 1000)} ms"


@dataclass(slots=True)
class CollectedChoice:
    """A choice, collected from its parts."""

    text: list[str] = field(default_factory=list)
    scores: list[TokenScore] | None = None
    extras: list[dict[str, Any]] = field(default_factory=list)
    finish: FinishReason = FinishReason.LENGTH
    stop: str | None = None

    @property
    def plain(self) -> bool:
        """Whether it is a text, and nothing else is to be told of it."""
        return self.scores is None and not self.extras and self.finish is not FinishReason.DEADLINE

    def add(self, part: TextDelta) -> None:
        """Appends a delta to the choice."""
        self.text.append(part.text)
        if part.scores is not None:
            if self.scores is None:
                self.scores = []
            self.scores.extend(part.scores)
        if part.extra is not None:
            self.extras.append(part.extra)
        if part.finish is not None:
            self.finish, self.stop = part.finish, part.stop


class ResponseFormatter(Protocol):
    """One API's way to write one answer."""

    def start(self) -> bytes:
        """Events that come before any text; asked for once the replica has begun to answer."""
        ...

    def events(self, parts: Sequence[TextDelta]) -> bytes:
        """Encodes these deltas as events."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Events that come after all text."""
        ...

    def whole(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        """The whole answer as one body."""
        ...


async def send_response(
    exchange: HttpExchange,
    answer: ResponseStream,
    shape: ResponseFormatter,
    *,
    choices: int,
    streams: bool,
    heartbeat_s: float,
) -> None:
    """Sends the answer to the client.

    Raises:
        ReplicaLost: The answer is not whole. What was streamed so far must be broken off, not ended.
    """
    if streams:
        await _stream(exchange, answer, shape, heartbeat_s)
        return
    collected = [CollectedChoice() for _ in range(choices)]
    # Whoever has all of it need not ask once more to hear that; but who wraps an answer may have to hear its end.
    unfinished = choices if isinstance(answer, PushStream) else math.inf
    async for parts in answer:
        for part in parts:
            if part.finish is None and part.scores is None and part.extra is None:
                collected[part.index].text.append(part.text)  # as most of an answer is
            else:
                collected[part.index].add(part)
                unfinished -= part.finish is not None
        if not unfinished:
            break
    await COHORT.sync(CohortStage.SETTLED)
    await exchange.respond(shape.whole(collected, exchange.context.usage))
    await COHORT.sync(CohortStage.SENT)


class _ExchangeSink:
    """Implements `core.service.StreamSink`: a stream that has begun."""

    def __init__(self, exchange: HttpExchange, shape: ResponseFormatter) -> None:
        self._exchange = exchange
        self._formatter = shape

    @property
    def open(self) -> bool:
        return self._exchange.ready

    def send(self, parts: Sequence[TextDelta]) -> None:
        if events := self._formatter.events(parts):
            self._exchange.write(events)


async def _stream(exchange: HttpExchange, answer: ResponseStream, shape: ResponseFormatter, heartbeat_s: float) -> None:
    """One write per batch: a reader that lags gets fewer, larger writes, and holds up nobody but itself."""
    async with StreamHeartbeat(exchange, heartbeat_s):
        batches = aiter(answer)
        first = await anext(batches)
        await exchange.stream(shape.start() + shape.events(first))
        if isinstance(answer, PushStream):
            answer.push_to(_ExchangeSink(exchange, shape))
        async for parts in batches:
            if events := shape.events(parts):
                await exchange.stream(events)
    await COHORT.sync(CohortStage.SETTLED)
    await exchange.finish(shape.end(exchange.context.usage))
    await COHORT.sync(CohortStage.SENT)
