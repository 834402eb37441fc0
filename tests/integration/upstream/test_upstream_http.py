"""Our HTTP client against servers that write every byte themselves."""

import asyncio
import json
import ssl
from contextlib import asynccontextmanager

import pytest

from maitred.core.request import FinishReason
from maitred.replica.http.connection import MAX_HEAD_BYTES, ResponseBroken
from maitred.replica.http.pool import ConnectFailed, HttpConnectionPool, OpenConnections
from maitred.replica.http.request_head import encode_head, encode_header, encode_request
from maitred.replica.upstream.dialects import DIALECTS
from maitred.replica.upstream.openai_stream import OpenAIStreamParser
from maitred.replica.upstream.secret_mask import SecretMask
from maitred.replica.upstream.stream import UpstreamStream
from maitred.testing.server_process import free_port

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"
REQUEST = encode_request(
    encode_head("POST", "/v1", {"host": "there"}), [encode_header("x-request-id", "one")], b"a body"
)
WAIT_S = 300.0
"""Nothing here takes so long; a test that waits longer has failed."""


class Server:
    """Writes scripted bytes, one script for each request: pieces, and None where it closes the connection."""

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.connections = 0
        self.requests = []
        self.asked = asyncio.Event()
        self.left = asyncio.Event()
        self.may_go_on = asyncio.Event()

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(head + await reader.readexactly(6))
                self.asked.set()
                for piece in self.scripts.pop(0):
                    if piece is None:
                        return
                    if piece is Ellipsis:
                        await self.go_on_or_be_left(reader)
                        continue
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()

    async def go_on_or_be_left(self, reader):
        left = asyncio.create_task(reader.read(1))
        go_on = asyncio.create_task(self.may_go_on.wait())
        await asyncio.wait([left, go_on], return_when=asyncio.FIRST_COMPLETED)
        go_on.cancel()
        if left.done():
            raise asyncio.IncompleteReadError(left.result(), None)
        left.cancel()
        await asyncio.wait([left])


@asynccontextmanager
async def line_to(*scripts, tls=None):
    server = Server(*scripts)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with asyncio.timeout(WAIT_S), listening, OpenConnections() as connections:
        yield server, HttpConnectionPool(connections, "127.0.0.1", listening.sockets[0].getsockname()[1], 5.0, tls)


async def asked(line):
    response = await line.send(REQUEST)
    return await response.read_body(1 << 24)


async def test_a_request_goes_out_as_it_was_written_and_bodies_of_all_three_kinds_are_read():
    long = b"x" * 3_000_000
    async with line_to(
        [OK + b"content-length: 3\r\n\r\nabc"],
        [OK + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n", b"1;what=ever\r\nc\r\n0\r\nx-trailer: 1\r\n\r\n"],
        [OK + b"content-length: 3000000\r\n\r\n", long],
        [OK + b"\r\nab", b"c", None],
    ) as (server, line):
        assert [await asked(line) for _ in range(4)] == [b"abc", b"abc", long, b"abc"]
        assert server.connections == 1
        assert (
            server.requests[0]
            == b"POST /v1 HTTP/1.1\r\nhost: there\r\nx-request-id: one\r\ncontent-length: 6\r\n\r\na body"
        )


async def test_a_head_that_comes_byte_by_byte_is_read_with_its_interim_responses_before():
    head = b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + OK + b"X-Two:  b \r\n"
    pieces = [bytes([byte]) for byte in head + b"content-length: 2\r\n\r\nhi"]
    async with line_to(pieces) as (_, line):
        response = await line.send(REQUEST)
        assert (response.status, response.headers[b"x-two"].strip(), b"link" in response.headers) == (200, b"b", False)
        assert await response.read_body(10) == b"hi"


async def test_no_trailer_becomes_a_header():
    begin = OK + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n"
    end = b"0\r\nretry-after: 9\r\ncontent-type: text/html\r\n\r\n"
    async with line_to([begin + end], [begin, end]) as (server, line):
        for _ in range(2):
            response = await line.send(REQUEST)
            assert await response.read_body(1 << 20) == b"ab"
            assert response.headers == {b"content-type": b"text/plain", b"transfer-encoding": b"chunked"}
        assert server.connections == 1


@pytest.mark.parametrize("first", [b"0\r\nx: ", b"0\r\n", b"1;extension="])
async def test_trailers_and_chunk_extensions_without_end_break_a_response(first):
    begin = OK + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"
    async with line_to([begin + first, *[b"a" * 65536] * 100, ...]) as (_, line):
        response = await line.send(REQUEST)
        with pytest.raises(ResponseBroken, match="trailers"):
            await response.read_body(1 << 20)


@pytest.mark.parametrize(
    "pieces",
    [
        [OK + b"content-length: 9\r\n\r\nabc", None],
        [OK + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", None],
        [OK + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", b"zz\r\n", ...],
    ],
)
async def test_an_answer_that_is_cut_in_its_middle_is_not_taken_for_whole(pieces):
    async with line_to(pieces) as (_, line):
        response = await line.send(REQUEST)
        with pytest.raises(ResponseBroken):
            await response.read_body(1 << 20)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"SSH-2.0-OpenSSH\r\n", ...],
        [OK, None],
        [b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", ...],
        [OK + b"".join(b"x-%d: %b\r\n" % (at, b"y" * 1000) for at in range(100)), ...],
        [OK + b"x-long: " + b"y" * (MAX_HEAD_BYTES + 1) + b"\r\ncontent-length: 1\r\n\r\nz", ...],
    ],
)
async def test_what_is_no_head_or_too_long_a_one_is_no_response(pieces):
    async with line_to(pieces) as (server, line):
        with pytest.raises(ResponseBroken) as caught:
            await line.send(REQUEST)
        assert not caught.value.nothing_received
        assert len(server.requests) == 1


async def test_a_request_goes_out_again_only_where_a_kept_connection_was_closed_without_a_word():
    whole = [OK + b"content-length: 1\r\n\r\na"]
    async with line_to(whole, [None], whole, [b"HTTP/1.1 2", None], [None]) as (server, line):
        assert await asked(line) == b"a"
        assert await asked(line) == b"a"
        assert (server.connections, len(server.requests)) == (2, 3)
        with pytest.raises(ResponseBroken) as caught:
            await line.send(REQUEST)
        assert (caught.value.nothing_received, len(server.requests)) == (False, 4)
        with pytest.raises(ResponseBroken):  # nothing was kept, so a new one is not tried twice
            await line.send(REQUEST)
        assert (server.connections, len(server.requests)) == (3, 5)


async def test_a_request_goes_out_again_where_a_kept_connection_was_idle_for_too_long():
    whole = [OK + b"content-length: 1\r\n\r\na"]
    late = [b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n", None]
    async with line_to(whole, late, whole, late, late) as (server, line):
        assert [await asked(line), await asked(line)] == [b"a", b"a"]
        assert (server.connections, len(server.requests)) == (2, 3)
        assert (await line.send(REQUEST)).status == 408  # the second time, it is an answer
        assert (server.connections, len(server.requests)) == (3, 5)


async def test_a_408_on_a_connection_that_stays_open_is_an_answer():
    whole = [OK + b"content-length: 1\r\n\r\na"]
    async with line_to(whole, [b"HTTP/1.1 408 Late\r\ncontent-length: 0\r\n\r\n"]) as (server, line):
        assert await asked(line) == b"a"
        assert (await line.send(REQUEST)).status == 408
        assert (server.connections, len(server.requests)) == (1, 2)


@pytest.mark.parametrize("more", [b"connection: close\r\n", b""])
async def test_a_connection_serves_once_where_the_server_says_so_or_says_more_than_it_was_asked(more):
    surplus = b"" if more else OK + b"content-length: 1\r\n\r\nb"
    answer = [OK + more + b"content-length: 1\r\n\r\na" + surplus]
    async with line_to(answer, answer) as (server, line):
        assert [await asked(line), await asked(line)] == [b"a", b"a"]
        assert server.connections == 2


@pytest.mark.parametrize("pieces", [[...], [OK + b"content-length: 9\r\n\r\nabc", ...]])
async def test_whoever_is_cancelled_closes_the_connection(pieces):
    async with line_to(pieces, [OK + b"content-length: 1\r\n\r\nb"]) as (server, line):
        task = asyncio.create_task(asked(line))
        await server.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.left.wait()
        assert await asked(line) == b"b"
        assert server.connections == 2


async def test_a_response_that_is_closed_ends_the_work_there_and_one_that_may_end_leaves_its_connection():
    begun = [OK + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n", ..., b"1\r\nb\r\n0\r\n\r\n"]
    async with line_to(begun, [OK + b"content-length: 1\r\n\r\nc"], [OK + b"content-length: 9\r\n\r\nabc"]) as (
        server,
        line,
    ):
        response = await line.send(REQUEST)
        assert await response.read() == b"a"
        response.drain(WAIT_S)
        server.may_go_on.set()
        while not response.has_ended:  # noqa: ASYNC110 - it tells nobody any more
            await asyncio.sleep(0)
        assert await asked(line) == b"c"
        assert server.connections == 1
        response = await line.send(REQUEST)
        response.close()
        await server.left.wait()


async def test_a_server_waits_for_a_reader_that_does_not_read():
    size = 64 << 20
    async with line_to([OK + b"content-length: %d\r\n\r\n" % size, *[b"x" * (1 << 20)] * 64]) as (_, line):
        response = await line.send(REQUEST)
        for _ in range(1000):
            await asyncio.sleep(0)
        waiting = len(response.take_body())
        assert 0 < waiting < 2 << 20
        rest = 0
        while piece := await response.read():
            rest += len(piece)
        assert waiting + rest == size


async def test_an_absent_server_is_distinguished_from_one_that_does_not_answer():
    async with OpenConnections() as connections:
        with pytest.raises(ConnectFailed, match=r"no connection to 127\.0\.0\.1:"):
            await HttpConnectionPool(connections, "127.0.0.1", free_port(), 5.0).send(REQUEST)
        with pytest.raises(ConnectFailed):
            await HttpConnectionPool(connections, "nowhere.invalid", 80, 5.0).send(REQUEST)


async def test_a_server_without_tls_is_unreachable_by_tls():
    async with line_to([], tls=ssl.create_default_context) as (server, line):
        with pytest.raises(ConnectFailed):
            await line.send(REQUEST)
        assert server.requests == []


async def test_leaving_closes_all_connections():
    server = Server([OK + b"content-length: 9\r\n\r\nabc"])
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        async with OpenConnections() as connections:
            line = HttpConnectionPool(connections, "127.0.0.1", listening.sockets[0].getsockname()[1], 5.0)
            await line.send(REQUEST)
        async with asyncio.timeout(WAIT_S):
            await server.left.wait()


@pytest.mark.parametrize("value", ["one\r\nx-evil: 1", "one\n", "\x00", "\x7f"])
def test_no_value_of_a_header_can_begin_another_one(value):
    with pytest.raises(ValueError, match="control character"):
        encode_header("x-request-id", value)


def event(text=None, finish=None):
    delta = {} if text is None else {"content": text}
    data = json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
    return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data.encode())


async def test_text_is_poured_while_its_reader_waits_and_the_end_is_read():
    end = event(finish="stop") + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    head = OK + b"transfer-encoding: chunked\r\n\r\n"
    async with line_to([head + event("a"), ..., event("b"), event("c") + end]) as (server, line):
        response = await line.send(REQUEST)
        now_s = asyncio.get_running_loop().time()
        times = {
            "max_bytes": 1 << 20,
            "mask": SecretMask([]),
            "first_token_deadline_s": now_s + WAIT_S,
            "idle_timeout_s": WAIT_S,
            "deadline_s": now_s + WAIT_S,
        }
        stream = UpstreamStream(response, OpenAIStreamParser("there", 1, DIALECTS["generic"]), **times)
        poured = []

        def pour(batch):
            poured.extend(part.text for part in batch.parts)
            return True

        assert [part.text for part in (await anext(stream)).parts] == ["a"]
        stream.listen(pour)
        server.may_go_on.set()
        read = [part async for batch in stream for part in batch.parts]
        assert "".join([*poured, *(part.text for part in read)]) == "bc"
        assert read[-1].finish is FinishReason.STOP
        stream.close()


async def test_a_failure_of_the_sink_is_raised_by_the_reader():
    head = OK + b"transfer-encoding: chunked\r\n\r\n"
    async with line_to([head + event("a"), ..., event("b"), ...]) as (server, line):
        response = await line.send(REQUEST)
        now_s = asyncio.get_running_loop().time()
        times = {
            "max_bytes": 1 << 20,
            "mask": SecretMask([]),
            "first_token_deadline_s": now_s + WAIT_S,
            "idle_timeout_s": WAIT_S,
            "deadline_s": now_s + WAIT_S,
        }
        stream = UpstreamStream(response, OpenAIStreamParser("there", 1, DIALECTS["generic"]), **times)

        def pour(batch):
            raise LookupError(batch.parts[0].text)

        await anext(stream)
        stream.listen(pour)
        asyncio.get_running_loop().call_soon(server.may_go_on.set)
        with pytest.raises(LookupError, match="b"):
            await anext(stream)
        stream.close()
        server.may_go_on.clear()
