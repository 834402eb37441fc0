"""Answers of servers are bounded in bytes and in what they consist of, whatever API and form they have."""

import gzip
import json
import zlib
from functools import partial

import pytest
from aiohttp import web

from tests.integration.upstream.test_upstream_members import (
    ANSWER,
    COUNTED,
    DONE,
    MESSAGE,
    MESSAGE_EVENTS,
    STREAM,
    chunk,
)
from tests.integration.upstream.test_upstream_passing import running
from tests.support.upstream_gateway import upstream_gateway

# ruff: noqa: SIM117 - nested contexts say who lives within whom
MAX_BYTES = 1 << 16
FORMS = {
    "chat stream": ("openai", STREAM),
    "chat whole": ("openai", json.dumps(ANSWER).encode()),
    "messages stream": ("anthropic", MESSAGE_EVENTS),
    "messages whole": ("anthropic", json.dumps(MESSAGE).encode()),
}
LONG = "long " * 200_000
LONG_FORMS = {
    "chat stream": ("openai", chunk({"content": "x"}) + b": a comment\n\n" * 100_000 + STREAM),
    "chat whole": ("openai", json.dumps({**ANSWER, "padding": LONG}).encode()),
    "messages stream": ("anthropic", MESSAGE_EVENTS.replace(b"Hello", LONG.encode())),
    "messages whole": ("anthropic", json.dumps({**MESSAGE, "padding": LONG}).encode()),
}


def by_members(body):
    """A gzip member for every few bytes, as servers make them that flush each event."""
    size = len(body) // 50 + 1
    return b"".join(gzip.compress(body[at : at + size]) for at in range(0, len(body), size)) + bytes(8)


CODINGS = {
    "identity": bytes,
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "x-gzip": by_members,
    "Deflate": partial(zlib.compress, wbits=-zlib.MAX_WBITS),  # without its header
    "identity, gzip": gzip.compress,
    "deflate, gzip": lambda body: gzip.compress(zlib.compress(body)),
    "GZIP": bytes,  # it is not compressed
    "utf-8": bytes,
}


class Compressed:
    """A server that compresses its answers, though nobody asked for that."""

    def __init__(self, body, coding):
        self.body, self.coding, self.calls, self.status = CODINGS[coding](body), coding, 0, 200

    async def answer(self, request):
        if request.method == "GET":
            return web.json_response({"data": []})
        await request.read()
        self.calls += 1
        headers = {"content-type": "text/event-stream", "content-encoding": self.coding}
        return web.Response(body=self.body, headers=headers, status=self.status)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("form", FORMS)
async def test_a_compressed_answer_is_read(form, coding):
    kind, body = FORMS[form]
    server = Compressed(body, coding)
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", kind=kind) as system:
        for stream in (False, True):
            answer = await system.chat(stream=stream, max_tokens=50)
            assert answer.status_code == 200
            assert "llo" in answer.text
    assert server.calls == 2


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("form", LONG_FORMS)
async def test_an_answer_has_at_most_so_many_bytes_as_text(form, coding):
    kind, body = LONG_FORMS[form]
    server = Compressed(body, coding)
    async with running(server.answer) as url:
        async with upstream_gateway(f"{url}/v1", kind=kind, max_answer_bytes=MAX_BYTES, retries=2) as system:
            answer = await system.chat(max_tokens=1_000_000)
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replica_lost")
            assert server.calls == 1  # it would be as long again
            await system.wait_until(lambda: system.nothing_left)


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(STREAM)[:-20]),
        ("gzip", gzip.compress(STREAM)[:10] + STREAM),
        ("deflate", zlib.compress(STREAM)[:-20]),
        ("gzip", gzip.compress(b"") * 20_000 + gzip.compress(STREAM)),
        ("br", STREAM),
        ("gzip, " * 8 + "gzip", STREAM),
    ],
)
async def test_what_is_no_compressed_body_is_a_failure(coding, body):
    server = Compressed(body, "identity")
    server.coding = coding
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1") as system:
        assert (await system.chat()).status_code == 502
        await system.wait_until(lambda: system.nothing_left)


@pytest.mark.parametrize("coding", ["gzip", "Deflate", "x-gzip", "deflate, gzip"])
async def test_the_words_of_a_compressed_refusal_are_told(coding):
    server = Compressed(json.dumps({"error": {"message": "too odd", "param": "top_p"}}).encode(), coding)
    server.status = 400
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1") as system:
        answer = await system.chat()
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "too odd")
        assert answer.json()["error"]["param"] == "top_p"


async def test_calls_and_parts_without_end_end_the_answer():
    calls = [{"index": at, "id": f"c{at}", "function": {"name": "f", "arguments": "{}"}} for at in range(4_000)]
    several = [{"tool_calls": calls[at : at + 200]} for at in range(0, 4_000, 200)]
    images = [{"type": "image_url", "image_url": {"url": "https://e.x/i"}}] * 1_000
    for deltas in (several, [{"tool_calls": calls}], [{"images": images}] * 100):
        server = Compressed(b"".join(map(chunk, deltas)) + chunk({}, "stop") + COUNTED + DONE, "identity")
        async with running(server.answer) as url, upstream_gateway(f"{url}/v1", dialect="generic") as system:
            (choice,) = (await system.chat(max_tokens=100_000)).json()["choices"]
        assert choice["finish_reason"] == "length"
        assert len(choice["message"].get("tool_calls", ())) <= 1_024
