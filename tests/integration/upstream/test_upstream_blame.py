"""Whose fault a refusal is: what its caller is told, whom the request goes on to, and what the operator sees."""

import asyncio
import json
import logging

import pytest

from maitred.config.tree import TextModelConfig
from maitred.core.secret import Secret
from maitred.replica.health.breaker import BreakerState
from maitred.replica.upstream.config import UpstreamConfig
from maitred.routing.config import RoutingConfig
from maitred.routing.pools.config import FallbackConfig
from maitred.testing.scripted_openai import FaultKind, ScriptedFault, ServerScript, scripted_openai
from tests.integration.upstream.test_upstream_faults import TEXT, stream
from tests.integration.upstream.test_upstream_members import Bytes
from tests.integration.upstream.test_upstream_passing import running
from tests.support.upstream_gateway import upstream_gateway

KEY = "sk-upstream-0123456789"
CREDIT = {"error": {"type": "invalid_request_error", "message": "Your credit balance is too low. See org-1234567890."}}
ROUTING = RoutingConfig(fallbacks={"far": FallbackConfig(general=["near"])})


def refusing(status, body, content_type="application/json", head=""):
    data = body if isinstance(body, str) else json.dumps(body)
    lines = [f"HTTP/1.1 {status} No", f"content-type: {content_type}", f"content-length: {len(data.encode())}"]
    text = "\r\n".join([*lines, *([head] if head else []), "", data])
    return ServerScript(faults=[ScriptedFault(kind=FaultKind.BYTES, share=1.0, text=text)])


def model(*urls, **settings):
    return TextModelConfig(
        upstreams=[
            UpstreamConfig(url=f"{url}/v1", name=f"server-{number}", **{"dialect": "generic", **settings})
            for number, url in enumerate(urls)
        ]
    )


@pytest.mark.parametrize(
    ("status", "body", "content_type", "words"),
    [
        (400, [{"error": {"code": 400, "message": "Unknown name"}}], "application/json", "Unknown name"),
        (400, "<html><body><h1>Bad <b>model</b></h1></body></html>", "text/html", "Bad model"),
        (405, "not here", "text/plain", "not here"),
        (410, {"oops": 1}, "application/json", '{"oops":1}'),
        (418, "", "text/plain", "refuses the request with the status 418"),
    ],
)
async def test_the_requests_fault_is_told_after_one_call_and_breaks_nothing(status, body, content_type, words):
    with scripted_openai(refusing(status, body, content_type)) as server, scripted_openai(ServerScript()) as sound:
        models = {"far": model(server.url), "near": model(sound.url)}
        async with upstream_gateway("", models=models, routing=ROUTING, retries=2) as system:
            for _ in range(6):
                answer = await system.chat()
                assert answer.status_code == 400
                assert words in answer.json()["error"]["message"]
            assert len(server.truth().requests) == 6
            assert not sound.truth().requests
            assert system.upstream.status.breaker_state is BreakerState.CLOSED
            assert system.upstream.status.health.recent_stats(0.0).failed == 0


async def test_an_account_without_credit_fails_over_with_one_call(caplog):
    with scripted_openai(refusing(400, CREDIT)) as poor, scripted_openai(ServerScript()) as sound:
        async with upstream_gateway("", model=model(poor.url, sound.url), retries=2) as system:
            answers = await asyncio.gather(system.chat(), system.chat())
            assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == [TEXT, TEXT]
            assert len(poor.truth().requests) == 1
            assert any(server.status.account_refused for server in system.model.replicas)
    (alarm,) = [record for record in caplog.records if record.levelno == logging.ERROR and "account" in record.message]
    assert "credit balance" in alarm.message
    assert "org-1234567890" not in alarm.message


async def test_its_caller_is_told_nothing_of_the_account():
    with scripted_openai(refusing(400, CREDIT)) as poor:
        async with upstream_gateway("", model=model(poor.url), retries=2) as system:
            for answer in (await system.chat(), (await stream(system))[0]):
                assert answer.status_code == 503
                assert "credit" not in answer.text.lower()
                assert "org-" not in answer.text
            assert len(poor.truth().requests) == 2


async def test_an_account_falls_back_to_the_next_model():
    spent = refusing(429, {"error": {"code": "insufficient_quota", "message": "No."}})
    with scripted_openai(spent) as poor, scripted_openai(ServerScript()) as sound:
        models = {"far": model(poor.url), "near": model(sound.url)}
        async with upstream_gateway("", models=models, routing=ROUTING, retries=2) as system:
            answer = await system.chat()
            assert answer.headers["x-maitred-fallback"] == "general=near"
            assert len(poor.truth().requests) == 1


ODD_REQUEST = [
    'event: error\ndata: {"message": "too odd", "code": 400}\n\n',
    'event: error\ndata: {"message": "too odd", "type": "invalid_request_error"}\n\n',
    'data: {"code": 400, "message": "too odd", "data": null}\n\ndata: [DONE]\n\n',
    '{"code": "400", "message": "too odd"}',
    '{"type": "error", "error": {"type": "None", "code": "400", "message": "too odd"}}',
    'event: error\ndata: {"type": "error", "error": {"message": "too odd", "code": 400}}\n\n',
    'error: {"message": "too odd", "code": 400}\n\n',
]
NO_MONEY = [
    f"data: {json.dumps(CREDIT)}\n\n",
    json.dumps(CREDIT),
    f'event: error\ndata: {{"type": "error", "error": {json.dumps(CREDIT["error"])}}}\n\n',
    "event: error\ndata: insufficient_quota\n\n",
    '{"error": "invalid_api_key"}',
    '{"code": "InvalidApiKey", "message": "Not this one."}',
    '{"base_resp": {"status_code": 1008, "status_msg": "insufficient balance"}}',
]


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
@pytest.mark.parametrize("body", ODD_REQUEST)
async def test_an_error_in_place_of_an_answer_is_the_requests_in_any_form(kind, body):
    server = Bytes(body.encode())
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", kind=kind, retries=2) as system:
        for answer in (await system.chat(), (await stream(system))[0]):
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, "too odd")
        assert server.calls == 2


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
@pytest.mark.parametrize("body", NO_MONEY)
async def test_an_error_in_place_of_an_answer_is_the_accounts_in_any_form(kind, body):
    server = Bytes(body.encode())
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", kind=kind, retries=2) as system:
        for answer in (await system.chat(), (await stream(system))[0]):
            assert answer.status_code == 503
            assert "credit" not in answer.text.lower()
        assert server.calls == 2
        assert system.upstream.status.account_refused


async def test_an_error_within_a_choice_is_an_error():
    error = {"code": 400, "message": "too odd"}
    body = f"data: {json.dumps({'choices': [{'index': 0, 'delta': {}, 'finish_reason': 'error', 'error': error}]})}\n\n"
    server = Bytes(body.encode())
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", retries=2) as system:
        answer = await system.chat()
        assert (answer.status_code, answer.json()["error"]["message"], server.calls) == (400, "too odd", 1)


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_a_greeting_before_the_answer_is_no_error(kind):
    message = {"type": "message", "content": "Hello", "stop_reason": "end_turn"}
    answer = {"choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": "stop"}]}
    body = f'data: {{"message": "connected"}}\n\ndata: {json.dumps(message if kind == "anthropic" else answer)}\n\n'
    server = Bytes(body.encode())
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", kind=kind) as system:
        assert (await system.chat()).json()["choices"][0]["message"]["content"] == "Hello"


async def test_an_account_that_ends_in_the_middle_is_asked_once():
    begun = json.dumps({"choices": [{"index": 0, "delta": {"content": "Once"}}]})
    body = f"data: {begun}\n\ndata: {json.dumps(CREDIT)}\n\n"
    with scripted_openai(refusing(200, body, "text/event-stream")) as poor, scripted_openai(ServerScript()) as sound:
        async with upstream_gateway("", model=model(poor.url, sound.url), retries=2) as system:
            whole = await system.chat()
            assert whole.json()["choices"][0]["message"]["content"] == TEXT
            assert len(poor.truth().requests) == 1
            assert any(server.status.account_refused for server in system.model.replicas)


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_an_account_is_refused_whatever_the_status(status):
    with scripted_openai(refusing(status, CREDIT)) as poor, scripted_openai(ServerScript()) as sound:
        async with upstream_gateway("", model=model(poor.url, sound.url), retries=2) as system:
            assert (await system.chat()).status_code == 200
            assert any(server.status.account_refused for server in system.model.replicas)
            assert len(poor.truth().requests) <= 1


async def test_words_of_the_caller_raise_no_alarm():
    said = {"error": {"message": "messages.0.content: 'my credit balance' is no valid content"}}
    with scripted_openai(refusing(400, said)) as server:
        async with upstream_gateway("", model=model(server.url)) as system:
            answer = await system.chat(messages=[{"role": "user", "content": "my credit balance"}])
            assert answer.status_code == 400
            assert not system.upstream.status.account_refused
    said["error"]["code"] = 400
    with scripted_openai(refusing(200, said)) as server:
        async with upstream_gateway("", model=model(server.url)) as system:
            answer = await system.chat(messages=[{"role": "user", "content": "my credit balance"}])
            assert answer.status_code == 400
            assert not system.upstream.status.account_refused


@pytest.mark.parametrize("api_key", [KEY, "plain-credential/0123"])
async def test_the_credential_is_in_nothing_that_a_server_says(api_key, caplog):
    chunk = {"choices": [{"index": 0, "delta": {"content": f"I know {api_key}."}, "finish_reason": "stop"}]}
    answer = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    settings = {"api_key": Secret(api_key, "{env: KEY}")}
    for script in (
        refusing(400, {"error": {"message": f"Bad header {api_key}", "param": api_key}}),
        refusing(500, f"{api_key} failed", "text/plain"),
        refusing(200, answer, "text/event-stream"),
        refusing(200, f'data: {{"error": {{"message": "{api_key}", "code": 400}}}}\n\n', "text/event-stream"),
    ):
        with scripted_openai(script) as server:
            async with upstream_gateway("", model=model(server.url, **settings)) as system:
                for response in (await system.chat(), await system.chat(stream=True)):
                    assert api_key not in response.text
    assert api_key not in caplog.text


async def test_a_date_says_when_to_come_back():
    head = "date: Wed, 21 Oct 2026 07:28:00 GMT\r\nretry-after: Wed, 21 Oct 2026 07:28:40 GMT"
    with scripted_openai(refusing(429, {}, head=head)) as server:
        async with upstream_gateway("", model=model(server.url), retries=2) as system:
            answer = await system.chat()
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "40")
            assert len(server.truth().requests) == 1
