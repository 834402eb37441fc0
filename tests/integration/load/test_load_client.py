"""The tester's own HTTP client, against servers with scripted bytes."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from maitred.load.measure.record import RequestRecord, UserOutcome
from maitred.load.play.client.answer import StreamTotals
from maitred.load.play.client.caller import PATIENT, LoadClient, UserBehaviour
from maitred.load.play.client.connection import ConnectionFailed
from maitred.load.play.client.origin import Origin
from maitred.load.play.client.pool import ConnectionPool
from maitred.load.play.clock import RunClock

REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"


def event(text, finish=None):
    return (
        b"data: " + json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": finish}]}).encode() + b"\n\n"
    )


EVENTS = [event("a"), event("b"), event("c", "stop"), b"data: [DONE]\n\n"]
STREAM = b"".join(EVENTS)
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(*parts):
    return SSE_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts)


WHOLE = chunked(*EVENTS) + b"0\r\n\r\n"


def refusal(status, *headers):
    body = b'{"error": {"message": "no"}}'
    lines = [b"HTTP/1.1 %d x" % status, b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


class Server:
    """Answers the requests in their order; None closes the connection, a float waits."""

    def __init__(self, *answers: Sequence[bytes | float | None] | bytes) -> None:
        self.answers = [[answer] if isinstance(answer, bytes) else answer for answer in answers]
        self.connections = 0
        self.requests = 0
        self.left = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n{}"):
                answer = self.answers[min(self.requests, len(self.answers) - 1)]
                self.requests += 1
                for part in answer:
                    if part is None:
                        return
                    if isinstance(part, float):
                        await asyncio.sleep(part)
                    else:
                        writer.write(part)
                        await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()


@asynccontextmanager
async def calling(server: Server, *, retries: int = 0, timeout_s: float = 300.0) -> AsyncIterator[Callable]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    clock = RunClock()
    pool = ConnectionPool(
        Origin.parse(f"http://127.0.0.1:{port}"), ("127.0.0.1", port), connect_timeout_s=300, clock=clock
    )
    caller = LoadClient(
        pool, now_s=clock.now_s, retries=retries, timeout_s=timeout_s, rng=random.Random(0), traffic=StreamTotals()
    )

    async def ask(manners: UserBehaviour = PATIENT) -> RequestRecord:
        record = RequestRecord(0, 0, "default", clock.now_s(), 3)
        await caller.ask(record, REQUEST, manners, keep_text=True)
        return record

    async with listener:
        yield ask
        pool.close()


@pytest.mark.parametrize(
    "answer",
    [
        WHOLE,
        b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE,
        SSE_HEAD + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM,
        [SSE_HEAD + b"Connection: close\r\n\r\n" + STREAM, None],
    ],
    ids=["chunked", "after an interim response", "with a length", "until the connection closes"],
)
async def test_a_stream_is_read_however_it_is_framed(answer):
    async with calling(Server(answer)) as ask:
        record = await ask()
    assert (record.outcome, record.error) == (UserOutcome.COMPLETE, "")
    assert record.text == ["a", "b", "c"]
    assert record.intended_s <= record.sent_s <= record.headers_s <= record.arrivals_s[0] <= record.ended_s


async def test_every_piece_has_the_time_of_its_arrival():
    server = Server([chunked(EVENTS[0]), 0.15, *(b"%x\r\n%b\r\n" % (len(e), e) for e in EVENTS[1:]), b"0\r\n\r\n"])
    async with calling(server) as ask:
        record = await ask()
    gaps_s = [later - earlier for earlier, later in zip(record.arrivals_s, record.arrivals_s[1:], strict=False)]
    assert gaps_s[0] == pytest.approx(0.15, abs=0.1)
    assert len(gaps_s) == 2


async def test_a_connection_is_used_again_and_a_closed_one_replaced():
    server = Server(WHOLE, WHOLE, [WHOLE, None], WHOLE)
    async with calling(server) as ask:
        for _ in range(3):
            assert (await ask()).outcome is UserOutcome.COMPLETE
        assert server.connections == 1
        assert (await ask()).outcome is UserOutcome.COMPLETE
        assert server.connections == 2


async def test_a_connection_that_closes_as_it_is_used_again_is_replaced_at_once():
    server = Server(WHOLE, [None], WHOLE)
    async with calling(server, retries=0) as ask:
        records = [await ask(), await ask()]
    assert [(record.outcome, record.attempts) for record in records] == [(UserOutcome.COMPLETE, 1)] * 2
    assert (server.requests, server.connections) == (3, 2)


async def test_a_server_that_closes_every_connection_fails_in_the_end():
    server = Server(WHOLE, [None])
    async with calling(server, retries=0) as ask:
        records = [await ask(), await ask()]
    assert [record.outcome for record in records] == [UserOutcome.COMPLETE, UserOutcome.FAILED]
    assert (records[1].attempts, server.requests) == (1, 3)


@pytest.mark.parametrize(
    ("answer", "outcome", "words"),
    [
        ([chunked(EVENTS[0]), None], UserOutcome.CUT, "middle of the response"),
        ([SSE_HEAD + b"Connection: close\r\n\r\n" + EVENTS[0], None], UserOutcome.CUT, "[DONE]"),
        ([None], UserOutcome.FAILED, "without a response"),
        (b"hello?\r\n\r\n", UserOutcome.FAILED, "not HTTP"),
        (refusal(400), UserOutcome.REFUSED, "HTTP 400: no"),
        (refusal(503), UserOutcome.FAILED, "HTTP 503: no"),
    ],
)
async def test_what_goes_wrong_has_a_name_and_a_reason(answer, outcome, words):
    async with calling(Server(answer)) as ask:
        record = await ask()
    assert record.outcome is outcome
    assert words in record.error


async def test_nobody_listening_is_a_failure():
    async with calling(Server(WHOLE)) as ask:
        pass
    record = await ask()
    assert record.outcome is UserOutcome.FAILED
    assert "No connection" in record.error


async def test_failures_are_asked_again_and_only_the_last_attempt_is_recorded():
    soon = b"Retry-After-Ms: 1"
    server = Server(refusal(429, soon), refusal(503, soon), WHOLE)
    async with calling(server, retries=2) as ask:
        record = await ask()
    assert (record.outcome, record.attempts, record.status, server.requests) == (UserOutcome.COMPLETE, 3, 200, 3)
    assert record.error == ""


async def test_retries_end():
    server = Server(refusal(429, b"Retry-After-Ms: 1"))
    async with calling(server, retries=2) as ask:
        record = await ask()
    assert (record.outcome, record.attempts, server.requests) == (UserOutcome.REFUSED, 3, 3)


async def test_what_began_is_not_asked_again():
    server = Server([chunked(EVENTS[0]), None])
    async with calling(server, retries=2) as ask:
        record = await ask()
    assert (record.outcome, record.attempts, record.text) == (UserOutcome.CUT, 1, ["a"])


async def test_a_server_that_is_silent_times_out():
    async with calling(Server([600.0]), timeout_s=0.1) as ask:
        record = await ask()
    assert record.outcome is UserOutcome.TIMED_OUT
    assert 0.099 < record.ended_s - record.sent_s < 30.0


async def test_a_user_who_leaves_hangs_up():
    server = Server([chunked(EVENTS[0]), 2.0, b"x" * 1_000_000])
    async with calling(server) as ask:
        record = await ask(UserBehaviour(leave_after_s=0.1))
        assert record.outcome is UserOutcome.CANCELLED
        assert record.text == ["a"]
        async with asyncio.timeout(300):
            await server.left.wait()


async def test_a_user_who_stalls_reads_on_later_and_loses_nothing():
    pieces = [b"%x\r\n%b\r\n" % (len(e), e) for e in EVENTS[1:]]
    server = Server([chunked(EVENTS[0]), 0.5, *pieces, b"0\r\n\r\n"])
    async with calling(server) as ask:
        record = await ask(UserBehaviour(stall_after_s=0.02, stall_s=1.0))
    assert record.outcome is UserOutcome.COMPLETE
    assert record.text == ["a", "b", "c"]
    assert record.arrivals_s[1] - record.arrivals_s[0] > 0.9


async def test_a_task_that_is_cancelled_hangs_up():
    server = Server([chunked(EVENTS[0]), 30.0])
    async with calling(server) as ask:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await ask()
        server.answers = [[WHOLE]]
        assert (await ask()).outcome is UserOutcome.COMPLETE


async def test_connections_that_cannot_be_made_say_so():
    pool = ConnectionPool(Origin.parse("http://127.0.0.1:1"), ("127.0.0.1", 1), connect_timeout_s=300, clock=RunClock())
    with pytest.raises(ConnectionFailed, match="No connection"):
        await pool.take()
