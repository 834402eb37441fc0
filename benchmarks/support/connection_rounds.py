"""A turn: requests over kept connections to one gateway, and of every answer what came when.

Unlike the lanes of `benchmarks.support.lean_connections`, these read whatever a gateway writes, with a length or in
chunks, and watch streams. A lane is one connection with one request on the way. It looks only for what tells the end of
an answer and counts `WORD`, so reading costs it a few microseconds.
"""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

from benchmarks.support.canned_upstream import WORD

_LENGTH = b"content-length: "
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_DONE = b"data: [DONE]"
HUNG_UP = 0
"""In place of a status: the gateway closed the connection in the middle of an answer, or could not be reached."""


@dataclass
class Turn:
    """What came back.

    Attributes:
        statuses: Status -> how many.
        latencies_s: From sending a request to the end of its answer.
        first_s: Likewise to the first word.
        gaps_s: Between two readings with words of the same answer.
        words: Of all answers.
        whole: Streams that came to their ``[DONE]``.
        seconds: From the first request to the last answer.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    latencies_s: "array[float]" = field(default_factory=lambda: array("d"))
    first_s: "array[float]" = field(default_factory=lambda: array("d"))
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    words: int = 0
    whole: int = 0
    seconds: float = 0.0

    @property
    def requests(self) -> int:
        """All that were sent and ended."""
        return sum(self.statuses.values())

    @property
    def failures(self) -> int:
        """Answers that are none."""
        return self.requests - self.statuses[200]


async def take(port: int, requests: Iterator[bytes], *, lanes: int, spread_s: float = 0.0) -> Turn:
    """Sends all requests and reads all answers.

    Args:
        port: Of the gateway, on this machine.
        requests: Each is taken by the lane that is free first.
        lanes: Connections.
        spread_s: In which they begin, one after the other.
    """
    loop = asyncio.get_running_loop()
    turn = Turn()
    opened = [Lane(requests, turn) for _ in range(lanes)]
    for lane in opened:
        await loop.create_connection(lambda lane=lane: lane, "127.0.0.1", port)  # type: ignore[misc]
    started_s = time.perf_counter()
    for number, lane in enumerate(opened):
        loop.call_later(spread_s * number / lanes, lane.begin)
    try:
        await asyncio.gather(*(lane.over for lane in opened))
    finally:
        for lane in opened:
            lane.close()
    turn.seconds = time.perf_counter() - started_s
    return turn


class Lane(asyncio.Protocol):
    """One connection.

    Args:
        requests: To be sent, one after the other.
        turn: Gets what came.
    """

    def __init__(self, requests: Iterator[bytes], turn: Turn) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests = requests
        self._turn = turn
        self._sent_s = self._word_s = 0.0
        self._head = b""
        self._status = 0
        self._chunked = False
        self._left = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def begin(self) -> None:
        """Sends the next request, if there is one."""
        request = next(self._requests, None)
        if request is None:
            if not self.over.done():
                self.over.set_result(None)
            return
        self._head, self._status, self._tail, self._word_s = b"", 0, b"", 0.0
        self._transport.write(request)
        self._sent_s = time.perf_counter()

    def close(self) -> None:
        """Hangs up."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if not self._status:
            data = self._head + data
            at = data.find(b"\r\n\r\n")
            if at < 0:
                self._head = data
                return
            head = data[:at].lower()
            self._status = int(head[9:12])
            length = head.find(_LENGTH)
            self._chunked = length < 0
            if not self._chunked:
                self._left = int(head[length + len(_LENGTH) :].partition(b"\r")[0])
            data = data[at + (2 if self._chunked else 4) :]  # The last chunk of none is after a line's end, too.
        self._read(data)

    def _read(self, data: bytes) -> None:
        tail = self._tail
        seen = tail + data
        words = seen.count(WORD) - tail.count(WORD)
        if words:
            now_s = time.perf_counter()
            if self._word_s:
                self._turn.gaps_s.append(now_s - self._word_s)
            else:
                self._turn.first_s.append(now_s - self._sent_s)
            self._word_s = now_s
            self._turn.words += words
        self._left -= len(data)
        ended = seen.endswith(_LAST_CHUNK) if self._chunked else self._left <= 0
        self._tail = seen[-32:]
        if not ended:
            return
        if self._chunked and _DONE in seen:
            self._turn.whole += 1
        self._turn.latencies_s.append(time.perf_counter() - self._sent_s)
        self._turn.statuses[self._status] += 1
        self.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if not self.over.done():
            self._turn.statuses[HUNG_UP] += 1
            self.over.set_result(None)
