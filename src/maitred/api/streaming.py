"""How an answer goes out, whole or as a stream, whatever the API's shape.

The status line of a stream waits for the replica's first sign of life. Up to then a failure is an honest 502 or 503,
which clients retry by themselves; and nothing is lost by waiting, because there is nothing to show before the first
token. Only when that takes so long that a proxy on the way might give up does the stream begin without it, with
comments that every reader of event streams skips (see `StreamHeartbeat`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from maitred.api.exchange import HttpExchange
from maitred.api.heartbeat import StreamHeartbeat
from maitred.core.answer import PushStream, ResponseStream, TextDelta, TokenScore
from maitred.core.cohort import COHORT, CohortStage
from maitred.core.request import FinishReason, Usage


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
    """Implements `core.answer.Outlet`: a stream that has begun."""

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
