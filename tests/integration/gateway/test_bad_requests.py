"""Requests with faults, and the error that each gets: status, field and code, in OpenAI's shape."""

import asyncio
import gzip
import json

import pytest

from maitred.api.large_body import LARGE_BODY_BYTES, LargeBodyReader
from maitred.core.limits import Limit, LimitKind
from tests.support.gateway import CARD, MODEL, gateway
from tests.support.openai_schemas import validate

USER = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat(**fields):
    return CHAT, {"model": MODEL, "messages": USER, **fields}


def text(**fields):
    return TEXT, {"model": MODEL, "prompt": "Hi", **fields}


BAD = [
    # (path and body, status, param, code)
    (chat(model="gpt-5"), 404, "model", "model_not_found"),
    (chat(model=None), 400, "model", "invalid_value"),
    ((CHAT, {"messages": USER}), 400, "model", "invalid_value"),
    ((CHAT, {"model": MODEL}), 400, "messages", "invalid_value"),
    (chat(messages=[]), 400, "messages", "invalid_value"),
    (chat(messages="Hi"), 400, "messages", "invalid_value"),
    (chat(messages=[{"role": "user", "content": 3}]), 400, "messages[0].content", "invalid_value"),
    (chat(messages=[*USER, {"role": "robot", "content": "x"}]), 400, "messages[1].role", "invalid_value"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
        400,
        "messages[0].content[0].image_url",
        "invalid_value",
    ),
    (chat(temperature=2.5), 400, "temperature", "invalid_value"),
    (chat(temperature="hot"), 400, "temperature", "invalid_value"),
    (chat(top_p=0), 400, "top_p", "invalid_value"),
    (chat(n=0), 400, "n", "invalid_value"),
    (chat(n=CARD.max_choices + 1), 400, "n", "invalid_value"),
    (chat(n=100_000), 400, "n", "invalid_value"),
    (chat(max_tokens=0), 400, "max_tokens", "invalid_value"),
    (chat(max_tokens=CARD.context_tokens), 400, "max_tokens", "context_length_exceeded"),
    (chat(max_completion_tokens=10**6), 400, "max_completion_tokens", "context_length_exceeded"),
    (chat(messages=[{"role": "user", "content": "word " * 600}]), 400, "messages", "context_length_exceeded"),
    (chat(stop=[""]), 400, "stop", "invalid_value"),
    (chat(stop=["x"] * 17), 400, "stop", "invalid_value"),
    (chat(logit_bias={"a": 1}), 400, "logit_bias", "invalid_value"),
    (chat(logit_bias={"99999999": 1}), 400, "logit_bias", "invalid_value"),
    (chat(stop_token_ids=[99_999_999]), 400, "stop_token_ids", "invalid_value"),
    (chat(min_tokens=9, max_tokens=8), 400, "min_tokens", "invalid_value"),
    (chat(top_logprobs=2), 400, "top_logprobs", "invalid_value"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "invalid_value"),
    (chat(stream_options={"include_usage": True}), 400, "stream_options", "invalid_value"),
    (chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools", "invalid_value"),
    (chat(seed=2**70), 400, "seed", "invalid_value"),
    (text(prompt=[]), 400, "prompt", "invalid_value"),
    (text(prompt=[[]]), 400, "prompt[0]", "invalid_value"),
    (text(prompt=[CARD.vocab_size]), 400, "prompt", "invalid_value"),
    (text(prompt=[1] * 600), 400, "prompt", "context_length_exceeded"),
    (text(prompt=["x"] * 2049), 400, "prompt", "invalid_value"),
    (text(suffix="x"), 400, "suffix", "invalid_value"),
    (text(best_of=3), 400, "best_of", "invalid_value"),
    (text(logprobs=21), 400, "logprobs", "invalid_value"),
    (("/tokenize", {}), 400, "prompt", "invalid_value"),
    (("/tokenize", {"prompt": "x", "model": "y"}), 404, "model", "model_not_found"),
    (("/detokenize", {"tokens": [CARD.vocab_size]}), 400, "tokens", "invalid_value"),
]
RAW = [
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b"null", 400),
    (b'{"model": "\xff"}', 400),
    (b"[" * 100_000, 400),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
]


def check_error(response, status, code):
    assert response.status_code == status, response.text
    body = response.json()
    validate("ErrorResponse", body)
    error = body["error"]
    assert error["code"] == code
    assert error["message"].endswith((".", "?"))
    assert response.headers["x-request-id"]
    return error


async def test_every_bad_request_gets_an_error_with_what_is_wrong_and_where():
    async with gateway() as system:
        for (path, body), status, param, code in BAD:
            response = await system.client.post(path, json=body)
            error = check_error(response, status, code)
            assert error["param"] == param, error
            assert error["type"] == "invalid_request_error"
        # None of them has cost the engine anything.
        assert not system.engine.submitted


async def test_bytes_that_are_no_request():
    async with gateway() as system:
        for raw, status in RAW:
            response = await system.client.post(CHAT, content=raw)
            check_error(response, status, "invalid_value")
        assert not system.engine.submitted


async def test_a_wrong_content_type_is_tolerated():
    async with gateway() as system:
        body = json.dumps({"model": MODEL, "messages": USER, "max_tokens": 2}).encode()
        response = await system.client.post(CHAT, content=body, headers={"content-type": "text/plain"})
        assert response.status_code == 200


async def test_numbers_in_the_message_about_the_window():
    async with gateway() as system:
        path, body = chat(max_tokens=510)
        message = (await system.client.post(path, json=body)).json()["error"]["message"]
        assert "512" in message
        assert "510" in message


async def test_unknown_paths_and_methods():
    async with gateway() as system:
        check_error(await system.client.get("/v2/models"), 404, "not_found")
        check_error(await system.client.get("/v1/models/none/such"), 404, "model_not_found")
        response = await system.client.get(CHAT)
        check_error(response, 405, "method_not_allowed")
        assert response.headers["allow"] == "POST"
        response = await system.client.delete("/v1/models")
        check_error(response, 405, "method_not_allowed")
        assert response.headers["allow"] == "GET, HEAD"
        head = await system.client.head("/health")
        assert (head.status_code, head.content) == (200, b"")


async def test_a_body_over_the_limit_is_refused_while_it_is_read():
    async with gateway(max_body_bytes=2000) as system:
        response = await system.client.post(CHAT, content=b"x" * 2001)
        check_error(response, 413, "request_too_large")

        async def chunks():
            for _ in range(50):
                yield b"x" * 100
                await asyncio.sleep(0)

        response = await system.client.post(CHAT, content=chunks())
        check_error(response, 413, "request_too_large")
        assert system.gate.count == 0


async def test_the_clients_request_id_is_kept_if_it_is_safe():
    async with gateway() as system:
        response = await system.client.get("/health", headers={"x-request-id": "my-id.7"})
        assert response.headers["x-request-id"] == "my-id.7"
        response = await system.client.get("/nowhere", headers={"x-request-id": "<script>"})
        assert response.headers["x-request-id"].startswith("req-")


async def test_the_same_request_id_twice_at_once():
    async with gateway(step_s=0.02) as system:
        headers = {"x-request-id": "twice"}
        body = {"model": MODEL, "messages": USER, "max_tokens": 5}
        answers = await asyncio.gather(*(system.client.post(CHAT, json=body, headers=headers) for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200, 200, 200]


async def test_strict_mode_names_the_field_it_does_not_know():
    async with gateway(strict=True) as system:
        path, body = chat(temprature=1)
        error = check_error(await system.client.post(path, json=body), 400, "invalid_value")
        assert error["param"] == "temprature"
        assert "temperature" in error["message"]


async def test_a_fault_of_ours_reveals_nothing(monkeypatch, caplog):
    async with gateway() as system:

        def explode(*_args, **_kwargs):
            raise KeyError("secret detail")

        monkeypatch.setattr(system.link, "generate", explode)
        response = await system.client.post(*[CHAT], json={"model": MODEL, "messages": USER})
        error = check_error(response, 500, "internal_error")
        assert error["type"] == "server_error"
        assert "secret" not in response.text
        assert response.headers["x-request-id"] in error["message"]
        assert "secret detail" in caplog.text


@pytest.mark.parametrize(
    "path", ["/health", "/health/live", "/health/ready", "/version", "/v1/models", "/openapi.json"]
)
async def test_service_routes_answer_in_json(path):
    async with gateway() as system:
        response = await system.client.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        assert response.json()


async def test_a_compressed_body_is_read_or_refused_by_name():
    body = gzip.compress(json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 2}).encode())
    async with gateway(max_body_bytes=1024) as system:
        for coding, data, status in (
            ("gzip", body, 200),
            ("zstd", body, 415),
            ("gzip", b"{}", 400),
            ("gzip", gzip.compress(b" " * 10_000), 413),
        ):
            response = await system.client.post("/v1/completions", content=data, headers={"content-encoding": coding})
            assert response.status_code == status
            assert response.headers.get("accept-encoding") == ("gzip, deflate" if status == 415 else None)
        response = await system.client.post("/v1/messages", content=b"{}", headers={"content-encoding": "br"})
        assert (response.status_code, response.json()["error"]["type"]) == (415, "invalid_request_error")


async def test_a_page_of_another_site_cannot_use_a_server_without_keys():
    async with gateway() as system:
        for headers in (
            {"origin": "https://evil.example", "sec-fetch-site": "cross-site", "content-type": "text/plain"},
            {"origin": "null"},
            {"host": "evil.example:8000", "origin": "http://evil.example:8000", "sec-fetch-site": "same-origin"},
        ):
            for method, path in (("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/v1/models")):
                response = await system.client.request(method, path, headers=headers)
                assert (response.status_code, response.json()["error"]["code"]) == (403, "permission_denied")
        port = system.url.rpartition(":")[2]
        for headers in ({}, {"origin": system.url}, {"host": f"localhost:{port}"}, {"origin": "http://localhost:3000"}):
            assert (await system.client.get("/v1/models", headers=headers)).status_code == 200
    async with gateway(allowed_hosts=("evil.example",)) as system:
        assert (await system.client.get("/v1/models", headers={"host": "evil.example"})).status_code == 200
    async with gateway(allow_unauthenticated=False) as system:
        assert (await system.client.get("/v1/models", headers={"host": "evil.example"})).status_code == 200


FAR_TOO_MANY = [{"role": "user", "content": "a"}] * 200_000


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"])
async def test_a_body_with_too_many_strings_is_refused_on_every_route(path):
    async with gateway() as system:
        body = {"model": MODEL, "max_tokens": 1, "messages": FAR_TOO_MANY}
        response = await system.client.post(path, json=body, headers={"anthropic-version": "2023-06-01"})
        assert response.status_code == 400
        assert "strings" in response.json()["error"]["message"]


async def test_a_large_body_is_read_as_a_small_one_but_not_beyond_the_rate():
    limit = Limit(id="two", subject="tenant:anonymous", kind=LimitKind.REQUESTS_PER_MINUTE, value=2)
    large = {"model": MODEL, "messages": USER, "max_tokens": 1, "user": "x" * 400_000}
    async with gateway(limited=[limit]) as system:
        assert (await system.client.post(CHAT, json=large)).status_code == 200
        assert (await system.client.post(CHAT, json=large | {"n": 1000})).status_code == 400
        assert (await system.client.post(CHAT, json=large)).status_code == 200
        response = await system.client.post(CHAT, content=b"{" * 400_000)
        assert response.status_code == 429
        assert response.json()["error"]["limit"] | {"reset_s": 0} == {
            **{"scope": "tenant:anonymous", "limit": "requests_per_minute"},
            **{"value": 2, "used": 2, "remaining": 0, "reset_s": 0},
        }


LARGE_BODIES = {
    "plain": (b'{"model": "tiny", "max_tokens": 1, ' + b" " * 400_000, {}),
    "compressed": (gzip.compress(b'{"model": "tiny", ' + b" " * 400_000, mtime=0), {"content-encoding": "gzip"}),
}


@pytest.mark.parametrize("body", LARGE_BODIES.values(), ids=LARGE_BODIES)
async def test_a_large_body_is_not_decoded_while_the_rate_of_tokens_is_used_up(body):
    limit = Limit(id="tokens", subject="tenant:anonymous", kind=LimitKind.TOKENS_PER_MINUTE, value=60)
    content, headers = body
    async with gateway(limited=[limit]) as system:
        assert (await system.client.post(CHAT, content=content, headers=headers)).status_code == 400
        prompt_tokens = (await system.client.post(CHAT, json=chat(max_tokens=1)[1])).json()["usage"]["prompt_tokens"]
        await system.client.post(CHAT, json=chat(max_tokens=60 - 2 * prompt_tokens - 1)[1])
        response = await system.client.post(CHAT, content=content, headers=headers)
        assert response.status_code == 429
        error = response.json()["error"]
        assert (error["code"], error["limit"]["limit"]) == ("rate_limit_exceeded", "tokens_per_minute")
        assert "this request needs at least 2" in error["message"]
        assert int(response.headers["retry-after"]) >= 1
        assert response.headers["x-ratelimit-remaining-tokens"] == "0"
        # No limit holds for it.
        count = await system.client.post("/tokenize", json={"prompt": "a" * 400_000})
        assert count.status_code == 200


@pytest.mark.parametrize("repeat_key", [None, "again"])
@pytest.mark.parametrize("coding", [None, "gzip", "gzip, of few bytes"])
async def test_limits_are_asked_once_for_a_large_body(coding, repeat_key, monkeypatch):
    asked, check = [], LargeBodyReader.check

    async def counted(self, context, least_output):
        if least_output is not None:
            asked.append(least_output)
        await check(self, context, least_output)

    monkeypatch.setattr(LargeBodyReader, "check", counted)
    filling = " " * LARGE_BODY_BYTES if coding == "gzip, of few bytes" else "".join(map(chr, range(65, 127))) * 10_000
    body = json.dumps({"model": MODEL, "messages": USER, "max_tokens": 1, "user": filling}).encode()
    headers = {"content-type": "application/json"}
    if repeat_key is not None:
        headers["idempotency-key"] = repeat_key
    if coding is not None:
        body, headers["content-encoding"] = gzip.compress(body), "gzip"
    async with gateway() as system:
        await system.client.post(CHAT, content=body, headers=headers)
    assert asked == [1]
