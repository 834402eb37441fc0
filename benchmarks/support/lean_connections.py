"""A client that costs little: requests as bytes over connections that are kept, answers measured and forgotten.

A lane is one connection. It sends the next request as soon as it has read the answer to the last one, or keeps several
on the way (pipelining). It reads status and length of an answer and skips its body, some 10 µs an answer on an event
loop of uvloop, so it does not slow down what it measures.
"""

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

NUMBER = "000000000 "
"""Beginning of a text that is to be another one in each request; see `distinct`."""
_LENGTH = b"content-length: "
_numbers = itertools.count(1)


@dataclass
class Answers:
    """What came back.

    Attributes:
        statuses: Status -> how many.
        latencies_s: From sending a request to the end of its answer, in the order of the answers.
        seconds: From the first request to the last answer.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    seconds: float = 0.0


def request_of(path: str, body: bytes, key: str = "") -> bytes:
    """A POST as it goes over the wire."""
    credential = f"authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nuser-agent: lanes\r\naccept: application/json\r\n"
        f"content-type: application/json\r\n{credential}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def distinct(request: bytes) -> Iterator[bytes]:
    """Repeats a request whose text begins with `NUMBER`, and counts there: no text comes twice.

    A gateway that remembers texts, or their tokens, has no use of that then.
    """
    number = NUMBER.encode()
    before, found, after = request.partition(number)
    assert found, "a text begins with NUMBER"
    return (before + b"%0*d " % (len(number) - 1, next(_numbers)) + after for _ in itertools.repeat(None))


async def drive(port: int, requests: Iterator[bytes], *, lanes: int, depth: int = 1) -> Answers:
    """Sends all requests and reads all answers.

    Args:
        port: Of the gateway, on this machine.
        requests: Each is taken by the lane that is free first.
        lanes: Connections.
        depth: Requests on the way in each.

    Raises:
        ConnectionError: The gateway hung up with requests on the way.
    """
    loop = asyncio.get_running_loop()
    answers = Answers()
    open_lanes = [
        (await loop.create_connection(lambda: _Lane(requests, depth, answers), "127.0.0.1", port))[1]
        for _ in range(lanes)
    ]
    started_s = time.perf_counter()
    for lane in open_lanes:
        lane.begin()
    try:
        await asyncio.gather(*(lane.over for lane in open_lanes))
    finally:
        for lane in open_lanes:
            lane.close()
    answers.seconds = time.perf_counter() - started_s
    return answers


class _Lane(asyncio.Protocol):
    def __init__(self, requests: Iterator[bytes], depth: int, answers: Answers) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests = requests
        self._depth = depth
        self._answers = answers
        self._sent_s: deque[float] = deque()
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def begin(self) -> None:
        for _ in range(self._depth):
            self._send()
        self._end_if_done()

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data
        while True:
            head = buffer.find(b"\r\n\r\n")
            if head < 0:
                break
            at = buffer.index(_LENGTH, 0, head) + len(_LENGTH)
            end = head + 4 + int(buffer[at : buffer.index(b"\r", at)])
            if len(buffer) < end:
                break
            self._answers.statuses[int(buffer[9:12])] += 1
            self._answers.latencies_s.append(time.perf_counter() - self._sent_s.popleft())
            buffer = buffer[end:]
            self._send()
        self._buffer = buffer
        self._end_if_done()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_exception(ConnectionError("The gateway hung up.") if exc is None else exc)

    def _send(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self._sent_s.append(time.perf_counter())
            self._transport.write(request)

    def _end_if_done(self) -> None:
        if not self._sent_s and not self.over.done():
            self.over.set_result(None)
