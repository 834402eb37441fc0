"""What happens on a connection before there is a request."""

import asyncio
import contextlib
import gzip
import json
import sys

import httpx
import pytest

from maitred.api.http import protocol as http_protocol
from maitred.api.http.connection import EXTENSION
from maitred.api.http.server import HttpServer
from tests.support.gateway import MODEL, gateway


async def connect(system):
    host, port = system.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def test_headers_without_end_are_cut_off():
    async with gateway() as system:
        reader, writer = await connect(system)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nCookie: ")
        writer.write(b"x" * (http_protocol.HEAD_LIMIT_BYTES + 1))
        async with asyncio.timeout(300):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"\r\nx-request-id: req-" in answer
        assert b'"code":"headers_too_large"' in answer
        writer.close()


async def test_a_large_body_is_not_mistaken_for_a_large_head():
    async with gateway() as system:
        for _ in range(3):
            response = await system.client.post("/tokenize", json={"prompt": "word " * 100_000})
            assert response.status_code == 200


async def test_a_large_body_is_not_counted_to_the_head_that_follows_in_the_same_read():
    async with gateway() as system:
        body = b'{"prompt":"hi","user":"%b"}' % (b"x" * (http_protocol.HEAD_LIMIT_BYTES + 1))
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % len(body)
        reader, writer = await connect(system)
        writer.write(head + b"\r\n" + body + head)
        async with asyncio.timeout(300):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.write(b"Connection: close\r\n\r\n" + body)
            assert b"HTTP/1.1 200 " in await reader.read()
        writer.close()


async def test_a_connection_that_says_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_DEADLINE_S", 0.1)
    async with gateway() as system:
        reader, writer = await connect(system)
        async with asyncio.timeout(300):
            assert await reader.read() == b""
        writer.close()


async def test_a_request_that_takes_long_is_not_closed(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_DEADLINE_S", 0.1)
    async with gateway(step_s=0.05) as system:
        for _ in range(2):
            response = await system.chat(max_tokens=8)
            assert response.status_code == 200


async def test_what_is_not_http_is_answered_with_400():
    async with gateway() as system:
        reader, writer = await connect(system)
        writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01")
        async with asyncio.timeout(300):
            answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"\r\nx-request-id: req-" in head
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == ("invalid_request", "invalid_request_error")
        assert "use http://" in error["message"]


async def refusal_of(system, sent):
    reader, writer = await connect(system)
    writer.write(sent)
    async with asyncio.timeout(300):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 400 ")
    return json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: +5\r\n\r\nhello", "in Content-Length"),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2, 2\r\n\r\n{}", "in Content-Length"),
        (
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
            "Duplicate",
        ),
        (
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
            "Transfer-Encoding",
        ),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A : 1\r\n\r\n", "header token"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: 1\r\n 2\r\n\r\n", "whitespace"),
        (b"GET /health HTTP/1.2\r\nHost: localhost\r\n\r\n", "version"),
        (b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", "its target"),
        (b"BREW /health HTTP/1.1\r\nHost: localhost\r\n\r\n", "no method"),
        (b'{"prompt":"hello"}', "no method"),
    ],
)
async def test_a_refused_head_is_told_what_is_wrong_with_it(sent, reason):
    async with gateway() as system:
        message = await refusal_of(system, sent)
        assert reason in message
        assert "TLS" not in message


@pytest.mark.parametrize(
    "behind",
    [
        b"x",
        b'"}\n\n{"model"',
        b"GET /health HTTP/1.1\r\nX-A : 1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n",
        b"x" + b"y" * (3 * http_protocol.HEAD_LIMIT_BYTES),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [1, 3])
async def test_what_is_no_request_takes_no_answer_from_the_requests_before_it(behind, stream, count):
    """A Content-Length that is too small is the usual cause."""
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": stream}
    ).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with gateway(step_s=0.01) as system:
        reader, writer = await connect(system)
        writer.write((head + body) * count + behind)
        async with asyncio.timeout(300):
            answers = await reader.read()  # to the end: the connection is closed
        writer.close()
        assert answers.count(b"HTTP/1.1 200 OK") == answers.count(b"HTTP/1.1 ") == count
        assert answers.count(b'"finish_reason":"length"') == count
        assert answers.count(b"connection: close") == 1


async def test_an_incomplete_head_behind_a_request_does_not_end_its_answer(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_DEADLINE_S", 0.05)
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with gateway(step_s=0.05) as system:
        reader, writer = await connect(system)
        writer.write(head + body + b"POST /v1/chat")
        async with asyncio.timeout(300):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b'"finish_reason":"length"' in answer


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
"""As Java's HTTP client makes it with the first request of a connection without TLS."""


async def test_an_offer_to_speak_another_protocol_is_not_taken_up_and_loses_nothing():
    body = b'{"prompt":"hello there"}'
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: %d\r\n\r\n"
    offering, plain = (head % (offer, len(body)) for offer in (OFFER, b""))
    whole = offering + body + plain + body
    cuts = [
        [whole],
        [offering, body, plain + body],
        [whole[:70], whole[70 : len(offering) + 5], whole[len(offering) + 5 :]],
    ]
    async with gateway() as system:
        for reads in cuts:
            reader, writer = await connect(system)
            answers = []
            async with asyncio.timeout(300):
                for part in reads:
                    writer.write(part)
                    await asyncio.sleep(0)
                while len(answers) < 2:
                    answers.append(await answer_of(reader))
                writer.write(offering + body)  # a head that has come before
                answers.append(await answer_of(reader))
            writer.close()
            assert {status for status, _ in answers} == {b"HTTP/1.1 200 OK"}
            assert len({tokens for _, tokens in answers}) == 1


async def test_a_tunnel_is_refused():
    async with gateway() as system:
        reader, writer = await connect(system)
        writer.write(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n")
        async with asyncio.timeout(300):
            status = await reader.readline()
        writer.close()
        assert status.startswith(b"HTTP/1.1 4")


async def answer_of(reader):
    """Status line and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return head.partition(b"\r\n")[0], await reader.readexactly(int(length.partition(b":")[2]))


async def test_a_connection_that_is_kept_open_reaches_the_application_of_now():
    async def teapot(scope, receive, send):
        await send({"type": "http.response.start", "status": 418, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    def port_of(response):
        return response.extensions["network_stream"].get_extra_info("client_addr")[1]

    async with gateway() as system:
        before = await system.client.get("/health/ready")
        system.server.reconfigure(teapot, 30.0)
        after = await system.client.get("/health/ready")
        assert (before.status_code, after.status_code) == (200, 418)
        assert port_of(before) == port_of(after)
        async with httpx.AsyncClient(base_url=system.url) as newcomer:
            assert (await newcomer.get("/health/ready")).status_code == 418


def chunked(body, trailer=b"", head=b"Connection: close\r\n"):
    """A request in two parts: up to its last chunk, and its last chunk with the trailers."""
    first = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n%bTransfer-Encoding: chunked\r\n\r\n" % head
    return first + b"%x\r\n%b\r\n" % (len(body), body), b"0\r\n%b\r\n" % trailer


@pytest.mark.parametrize("reads", [1, 2])
@pytest.mark.parametrize("name", [b"X-Request-Id", b"x-maitred-priority", b"Idempotency-Key", b"Connection", b"Expect"])
async def test_no_trailer_becomes_a_header(reads, name):
    """Whether it comes with the head or after it; a value that would be refused shows that it is not heard."""
    begin, end = chunked(b'{"prompt":"hello"}', b"%b: by-trailer\r\n" % name)
    async with gateway() as system:
        reader, writer = await connect(system)
        async with asyncio.timeout(300):
            for part in (begin + end,) if reads == 1 else (begin, end):
                writer.write(part)
                await asyncio.sleep(0.01)
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"by-trailer" not in answer


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (b"0\r\nx: ", b"a" * 16_384),
        (b"0\r\n", b"a" * 16_384),
        (b"0\r\n", b"t: %b\r\n" % (b"v" * 200) * 80),
        (b"1;extension=", b"a" * 16_384),
    ],
)
async def test_trailers_and_chunk_extensions_without_end_are_cut_off(first, piece):
    begin, _ = chunked(b'{"prompt":"hello"}')
    async with gateway() as system:
        reader, writer = await connect(system)
        writer.write(begin + first)
        sent_bytes = 0
        async with asyncio.timeout(300):
            while not reader.at_eof() and sent_bytes < 40 * http_protocol.HEAD_LIMIT_BYTES:
                try:
                    writer.write(piece)
                    await writer.drain()
                except ConnectionError:
                    break
                sent_bytes += len(piece)
                await asyncio.sleep(0.001)
        assert sent_bytes < 40 * http_protocol.HEAD_LIMIT_BYTES
        writer.close()


async def test_an_answer_that_was_given_is_not_followed_by_another_for_the_same_request():
    """The body of the refused request never ends."""
    async with gateway() as system:
        reader, writer = await connect(system)
        begin, _ = chunked(b"{}", head=b"Content-Type: text/plain\r\n")
        writer.write(begin.replace(b"/tokenize", b"/nowhere"))
        async with asyncio.timeout(300):
            status, _ = await answer_of(reader)
            assert status.startswith(b"HTTP/1.1 404 ")
            writer.write(b"0\r\nx: " + b"a" * (2 * http_protocol.HEAD_LIMIT_BYTES))
            with contextlib.suppress(ConnectionError):  # what was sent after the end was not read
                assert await reader.read() == b""
        writer.close()


async def test_a_head_in_one_read_is_measured_exactly():
    async with gateway() as system:
        for excess, status in ((-100, b"HTTP/1.1 200 "), (100, b"HTTP/1.1 431 ")):
            reader, writer = await connect(system)
            cookie = b"c" * (http_protocol.HEAD_LIMIT_BYTES + excess)
            body = b'{"prompt":"%b"}' % (b"hello " * 30_000)
            writer.write(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\nCookie: " % len(body))
            writer.write(cookie + b"\r\nConnection: close\r\n\r\n" + body)
            async with asyncio.timeout(300):
                try:
                    assert (await reader.readline()).startswith(status)
                except ConnectionError:
                    assert excess > 0  # the body was not read any more
            writer.close()


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [
        (b"1.1", b"", b"400"),
        (b"1.1", b"Host: localhost\r\n", b"200"),
        (b"1.1", b"Host: localhost\r\nHost: localhost\r\n", b"400"),
        (b"1.1", b"Host: localhost\r\nhOST: 127.0.0.1\r\n", b"400"),
        (b"1.0", b"", b"200"),
        (b"1.0", b"Host: localhost\r\nHost: 127.0.0.1\r\n", b"400"),
    ],
)
async def test_a_request_names_one_host(version, hosts, status):
    async with gateway() as system:
        answer = await exchange(system, b"GET /health/live HTTP/%b\r\n%bConnection: close\r\n\r\n" % (version, hosts))
        assert answer.startswith(b"HTTP/1.1 %b " % status)
        assert (b'"code":"invalid_request"' in answer) == (status == b"400")


async def exchange(system, request):
    reader, writer = await connect(system)
    writer.write(request)
    async with asyncio.timeout(300):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("version", [b"0.9", b"2.0"])
async def test_a_request_of_another_version_is_refused(version):
    async with gateway() as system:
        answer = await exchange(system, b"GET /health/live HTTP/%b\r\nHost: localhost\r\n\r\n" % version)
        assert answer.startswith(b"HTTP/1.1 505 ")


@pytest.mark.parametrize(
    ("codings", "status"),
    [(b"gzip, chunked", b"501"), (b"gzip\r\nTransfer-Encoding: chunked", b"501"), (b"Chunked", b"200")],
)
async def test_a_transfer_coding_is_never_taken_for_the_content(codings, status):
    chunk = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: %b\r\n\r\n" % codings
    async with gateway() as system:
        answer = await exchange(system, head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunk), chunk))
        assert answer.startswith(b"HTTP/1.1 %b " % status)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_only_a_client_of_today_is_told_to_continue(version):
    body = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    head = b"POST /tokenize HTTP/%b\r\nHost: localhost\r\nConnection: close\r\nExpect: 100-continue\r\n" % version
    async with gateway() as system:
        reader, writer = await connect(system)
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body))
        async with asyncio.timeout(300):
            if version == b"1.1":
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(body)
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        (b"http://localhost/v1/models", b"localhost", b"200"),
        (b"http://localhost:80/v1/models", b"evil.example", b"200"),
        (b"http://evil.example/v1/models", b"localhost", b"403"),
        (b"http://evil.example?@localhost/v1/models", b"localhost", b"400"),
        (b"HTTPS://evil.example:80/v1/models", b"localhost", b"403"),
    ],
)
async def test_the_host_of_a_target_counts_instead_of_the_header(target, host, status):
    async with gateway() as system:
        head = b"GET %b HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % (target, host)
        answer = await exchange(system, head)
        assert answer.startswith(b"HTTP/1.1 %b " % status)


async def test_two_headers_of_codings_are_one_list():
    body = gzip.compress(gzip.compress(json.dumps({"model": MODEL, "prompt": "a"}).encode()))
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n" % len(body)
    async with gateway() as system:
        answer = await exchange(system, head + b"Content-Encoding: gzip\r\n" * 2 + b"\r\n" + body)
        assert answer.startswith(b"HTTP/1.1 415 ")


async def test_a_client_of_an_old_version_gets_its_stream_without_chunks():
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "stream": True}
    ).encode()
    head = b"POST /v1/chat/completions HTTP/%b\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    answers = []
    async with gateway() as system:
        for version in (b"1.0", b"1.1"):
            reader, writer = await connect(system)
            writer.write(head % (version, len(body)) + body)
            async with asyncio.timeout(300):
                answers.append((await reader.read()).partition(b"\r\n\r\n"))
            writer.close()
    (old, _, stream), (new, _, chunks) = answers
    assert b"transfer-encoding" not in old.lower()
    assert b"connection: close" in old.lower()
    assert b"transfer-encoding: chunked" in new.lower()
    assert stream.startswith(b"data: ")
    assert stream.endswith(b"data: [DONE]\n\n")
    assert not chunks.startswith(b"data: ")


async def test_a_whole_answer_for_a_client_of_an_old_version_keeps_its_length():
    async with gateway() as system:
        reader, writer = await connect(system)
        writer.write(b"GET /v1/models HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(300):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b"content-length: %d" % len(body) in head


CLIENT = """
import socket, sys, time
client = socket.socket(socket.AF_UNIX)
client.connect(sys.argv[1])
client.sendall(b"GET / HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
if sys.argv[2] == "leaves":
    time.sleep(0.1)
    client.close()
time.sleep(3600)
"""


@pytest.mark.parametrize("how", ["leaves", "dies"])
async def test_a_process_that_dies_is_told_from_one_that_leaves(tmp_path, how):
    """Nobody pays for what the death of a worker breaks off."""
    begun, ended = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def app(scope, receive, send):
        await receive()
        begun.set()
        await receive()
        ended.set_result(scope["extensions"][EXTENSION].peer_died)

    server = HttpServer(app, path=tmp_path / "http.sock")
    serving = asyncio.create_task(server.serve())
    while True:
        if server.started:
            break
        await asyncio.sleep(0.01)
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, str(tmp_path / "http.sock"), how)
    try:
        async with asyncio.timeout(300):
            await begun.wait()
            if how == "dies":
                client.kill()
            assert await ended == (how == "dies")
    finally:
        if how == "leaves":
            client.kill()
        await client.wait()
        server.stop()
        await serving
