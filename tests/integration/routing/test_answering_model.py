"""`model` in an answer is the model that gave it, in every API; the name that was asked for is in a header."""

import json

import pytest

from maitred.api.chat import ChatFormatter
from maitred.api.completions import CompletionFormatter
from maitred.api.messages import MessagesFormatter
from maitred.core.context import RequestContext
from maitred.core.inference import TextDelta
from maitred.core.request import FinishReason
from maitred.routing.auto.config import AutoConfig
from maitred.routing.config import RoutingConfig
from maitred.routing.pools.config import FallbackConfig
from maitred.testing.scripted_openai import FaultKind, scripted_openai
from maitred.wire.openai.decode import decode_chat, decode_completion
from tests.integration.gateway.test_overflow import before, send_together, sent_away
from tests.integration.routing.test_escalation import serving as escalating
from tests.integration.routing.test_routing import SOUND, broken, model
from tests.integration.upstream.test_upstream_passing import chunk
from tests.support.upstream_gateway import upstream_gateway

CONTEXT = RequestContext("r", 0.0, model="m")
USER = {"role": "user", "content": "What is the capital of France?"}
BODIES = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 8},
    "/v1/completions": {"prompt": "The capital of France", "max_tokens": 8},
    "/v1/messages": {"messages": [USER], "max_tokens": 8},
}
ROUTING = RoutingConfig(
    aliases={"nick": "second", "chain": "first"},
    fallbacks={"first": FallbackConfig(general=["second"])},
    auto={"auto": AutoConfig(small="second", medium="second", large="second", thresholds=(0.3, 0.35))},
)


def models_in(answer):
    """The models that a whole answer, or the events of a stream, name."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return {answer.json()["model"]}
    data = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return {(event.get("message") or event)["model"] for event in data if "model" in (event.get("message") or event)}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_aliases_fallbacks_and_choices_tell_who_answered(path, streams):
    headers = {"anthropic-version": "2023-06-01"}
    with scripted_openai(broken(FaultKind.ERROR_BODY)) as bad, scripted_openai(SOUND) as good:
        models = {"first": model(bad), "second": model(good)}
        async with upstream_gateway("", models=models, routing=ROUTING) as system:
            for asked in ("second", "nick", "first", "chain", "auto"):
                body = {**BODIES[path], "model": asked, "stream": streams}
                answer = await system.client.post(path, json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                assert (models_in(answer), answer.headers["x-maitred-requested-model"]) == ({"second"}, asked)
            unknown = await system.client.post(path, json={**BODIES[path], "model": "none"}, headers=headers)
            assert (unknown.status_code, unknown.headers.get("x-maitred-requested-model")) == (404, None)


async def test_an_escalated_answer_names_the_larger_model_and_one_that_is_kept_its_own():
    async with escalating(s=[chunk(content="I cannot help with that."), chunk(finish="stop")]) as (system, _):
        body = {"model": "auto", "messages": [USER], "max_tokens": 20}
        answer = await system.client.post("/v1/chat/completions", json=body)
        assert answer.json()["model"] == answer.headers["x-maitred-model"]
        assert answer.headers["x-maitred-requested-model"] == "auto"


async def test_a_request_that_overflows_names_the_other_model():
    async with before() as system:
        answers = await send_together(system)
        away = sent_away(answers)
        assert 0 < len(away) < len(answers)
        for number, answer in enumerate(answers):
            assert answer.status_code == 200
            assert answer.json()["model"] == ("cloud" if number in away else "mine")
            assert answer.headers["x-maitred-requested-model"] == "mine"


def test_chunks_name_the_model_that_goes_on_with_an_answer():
    chat = decode_chat(json.dumps({"model": "asked", "messages": [USER], "stream": True}).encode(), strict=True)
    completion = decode_completion(b'{"model":"asked","prompt":"x","stream":true}', strict=True)
    for formatter, request in ((ChatFormatter, chat), (CompletionFormatter, completion)):
        context = RequestContext("r", 0.0, model="first")
        shape = formatter(request, "id", context)
        events = shape.start() + shape.events([TextDelta(0, "a")])
        assert b'"model":"first"' in events
        context.model = "second"
        events = shape.events([TextDelta(0, "b", continued=True), TextDelta(0, "c")])
        assert (events.count(b'"model":"second"'), b'"model":"first"' in events) == (2, False)


def test_one_event_says_where_an_answer_goes_on():
    thought, last = TextDelta(0, "", extra={"reasoning_content": "b"}, continued=True), TextDelta(0, "c")
    ended = TextDelta(0, "b", FinishReason.LENGTH, continued=True)
    for shape in (
        ChatFormatter(decode_chat(json.dumps({"model": "m", "messages": [USER]}).encode(), strict=True), "id", CONTEXT),
        MessagesFormatter("id", CONTEXT, thoughts=True),
    ):
        shape.start()
        shape.events([TextDelta(0, "a")])
        for deltas in ([thought, last], [ended]):
            events = shape.events(deltas)
            assert events.count(b'"maitred":{"continued":true}') == 1
            (marked,) = [event for event in events.split(b"\n\n") if b'"maitred"' in event]
            assert b'"b"' in marked
