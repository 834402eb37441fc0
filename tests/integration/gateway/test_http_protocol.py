"""What happens on a connection before there is a request."""

import asyncio
import json

import httpx

from maitred.api.http import protocol as http_protocol
from tests.support.gateway import gateway


async def connect(system):
    host, port = system.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def test_headers_without_end_are_cut_off():
    async with gateway() as system:
        reader, writer = await connect(system)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nCookie: ")
        writer.write(b"x" * (http_protocol.HEAD_LIMIT_BYTES + 1))
        async with asyncio.timeout(60):
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
        head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
        reader, writer = await connect(system)
        writer.write(head + b"\r\n" + body + head)
        async with asyncio.timeout(60):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.write(b"Connection: close\r\n\r\n" + body)
            assert b"HTTP/1.1 200 " in await reader.read()
        writer.close()


async def test_a_connection_that_says_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_DEADLINE_S", 0.1)
    async with gateway() as system:
        reader, writer = await connect(system)
        async with asyncio.timeout(60):
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
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"\r\nx-request-id: req-" in head
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == ("invalid_request", "invalid_request_error")
        assert "use http://" in error["message"]


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
"""As Java's HTTP client makes it with the first request of a connection without TLS."""


async def test_an_offer_to_speak_another_protocol_is_not_taken_up_and_loses_nothing():
    body = b'{"prompt":"hello there"}'
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n"
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
            async with asyncio.timeout(60):
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
        async with asyncio.timeout(60):
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
