"""Streams of servers of others that break in their middle and go on at another one, by their text: real HTTP.

The servers here count in words: who is given "0 1 2" to go on with says " 3" next, and one that was not told to go on
begins at 0 again, so a text without a gap and without a repetition was put together rightly.
"""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import takewhile
from types import SimpleNamespace

import httpx
import pytest
from aiohttp import web

from maitred.admission.config import AdmissionConfig, PriceConfig
from maitred.config.tree import TextModelConfig
from maitred.core.context import Outcome
from maitred.replica.upstream.config import UpstreamConfig
from maitred.routing.config import RoutingConfig
from maitred.routing.pools.config import FallbackConfig
from maitred.testing.scripted_anthropic import Reply, ScriptedAnthropic
from maitred.testing.scripted_anthropic import text as anthropic_text
from maitred.testing.server_process import serving
from tests.integration.upstream.test_upstream_passing import running
from tests.support.tool_models import make_tool_model
from tests.support.upstream_gateway import upstream_gateway

TEXT = "0 1 2 3 4 5 6 7"
PROMPT_TOKENS = 40
QUICK = {"probe_every_s": 0.2}
"""Looks often whether a server is there; no server here is silent, so no answer has to come in a certain time."""


class Teller:
    """A server that counts.

    Args:
        breaks: For its first requests, after how many words each breaks off; None: it does not.
        counts: Whether it says with every chunk what it has counted.
        refuses: Whether it refuses to go on.
        thoughts: How many of its words are thoughts.
    """

    def __init__(self, *breaks, counts=False, refuses=False, thoughts=0):
        self.thoughts = thoughts
        self.breaks = list(breaks)
        self.counts = counts
        self.refuses = refuses
        self.bodies = []

    async def answer(self, request):
        if request.method == "GET":
            return web.json_response({"data": [{"id": "far", "max_model_len": 4096}]})
        body = await request.json()
        self.bodies.append(body)
        given = self.given(body)
        if self.refuses and given:
            return web.json_response({"error": {"message": "No prefill here.", "type": "bad"}}, status=400)
        breaks = self.breaks.pop(0) if self.breaks else None
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        chat = "messages" in body
        first = len(given.split())
        most = body.get("max_tokens") or body["max_completion_tokens"]
        for made, number in enumerate(range(first, first + most), 1):
            text = f" {number}" if number else "0"
            told = "reasoning_content" if number < self.thoughts else "content"
            delta = {"delta": {told: text}} if chat else {"text": text}
            event = {"id": "x", "choices": [{"index": 0, **delta, "finish_reason": None}]}
            if self.counts:
                event["usage"] = {"prompt_tokens": PROMPT_TOKENS + first, "completion_tokens": made}
            await self.send(response, event)
            if made == breaks:
                request.transport.abort()
                return response
        end = {"delta": {}} if chat else {"text": ""}
        await self.send(response, {"id": "x", "choices": [{"index": 0, **end, "finish_reason": "length"}]})
        usage = {"prompt_tokens": PROMPT_TOKENS + first, "completion_tokens": most}
        await self.send(response, {"id": "x", "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    def given(body):
        if "prompt" in body:
            return "".join(
                takewhile(lambda letter: letter.isdigit() or letter == " ", body["prompt"].partition(":")[2])
            )
        last = body["messages"][-1]
        return last["content"] if last["role"] == "assistant" else ""

    @staticmethod
    async def send(response, event):
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await asyncio.sleep(0.005)  # so that what was sent arrives before the connection breaks


@asynccontextmanager
async def gateway_before(*tellers, dialect="vllm", continuation="reprompt", retries=2, continues=False):
    """A gateway whose one model these run."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(running(teller.answer)) for teller in tellers]
        upstreams = [
            UpstreamConfig(
                url=f"{url}/v1", name=f"server-{number}", dialect=dialect, continues_answers=continues, **QUICK
            )
            for number, url in enumerate(urls)
        ]
        model = TextModelConfig(upstreams=upstreams, continuation=continuation)
        yield await stack.enter_async_context(upstream_gateway("", model=model, retries=retries))


async def streamed(system, path="/v1/chat/completions", **fields):
    """The events, whether ``[DONE]`` came, and whether the connection ended as it should."""
    body = {"model": "far", "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"messages": [{"role": "user", "content": "Count."}]} if "chat" in path else {"prompt": "Count:"}
    lines, clean = [], True
    async with system.client.stream("POST", path, json=body | fields) as response:
        assert response.status_code == 200, await response.aread()
        try:
            async for line in response.aiter_lines():
                lines.append(line)  # noqa: PERF401 - kept also when the connection breaks
        except httpx.RemoteProtocolError:
            clean = False
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(entry) for entry in data if entry != "[DONE]"], "[DONE]" in data, clean


def text_of(events):
    choices = [choice for event in events for choice in event.get("choices", ())]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_goes_on_at_another_server_and_says_where(dialect, path):
    first, second = Teller(3), Teller(3)
    async with gateway_before(first, second, dialect=dialect, retries=3) as system:
        events, done, clean = await streamed(system, path)
        assert (text_of(events), done, clean) == (TEXT, True, True)
        # Twice it broke: after three words, and after three more.
        assert [text_of([event]) for event in events if event.get("maitred") == {"continued": True}] == [" 3", " 6"]
        (context,) = system.contexts
        assert (context.continued, context.recoveries) == (2, 2)
        (event,) = system.ledger.events
        assert event.outcome is Outcome.FINISHED
        assert sorted(event.replica.split(",")) == ["server-0", "server-1"]
        asked = sorted(first.bodies + second.bodies, key=lambda body: -body["max_tokens"])
        assert [body["max_tokens"] for body in asked] == [8, 5, 2]
        await system.wait_until(lambda: system.nothing_left)
        assert system.admission.leases.active == 0


@pytest.mark.parametrize("counts", [True, False])
async def test_it_is_billed_once_for_what_the_caller_got(counts):
    async with gateway_before(Teller(3, counts=counts)) as system:
        events, done, _ = await streamed(system)
        assert (text_of(events), done) == (TEXT, True)
        (event,) = system.ledger.events
        assert event.output_tokens == events[-1]["usage"]["completion_tokens"] == 8
        # The prompt counts once, and what the second server read of the answer is no part of it.
        assert event.prompt_tokens == pytest.approx(PROMPT_TOKENS, abs=0 if counts else 1)
        # What nobody has counted, because the server broke off before it did, is an estimate.
        assert events[-1]["usage"].get("estimated", False) is not counts
        assert event.replica == "server-0"


async def test_without_the_setting_it_ends_with_an_error():
    async with gateway_before(Teller(3), Teller(), continuation="none") as system:
        for _ in range(2):
            events, done, clean = await streamed(system)
            if "error" in events[-1]:
                break
        assert (events[-1]["error"]["code"], done, clean) == ("replica_lost", False, False)
        assert all("maitred" not in event for event in events)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True},
        {"presence_penalty": 0.5},
        {"stop": ["2 3"]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_cannot_be_gone_on_with_ends_with_an_error(fields):
    teller = Teller(3)
    async with gateway_before(teller) as system:
        events, done, _ = await streamed(system, **fields)
        assert (events[-1]["error"]["code"], done) == ("replica_lost", False)
        assert len(teller.bodies) == 1
        await system.wait_until(lambda: system.nothing_left)
        (event,) = system.ledger.events
        assert (event.outcome, event.cost_nusd) == (Outcome.FAILED, 0)


async def test_a_server_that_refuses_to_go_on_is_no_fault_of_the_caller():
    async with gateway_before(Teller(3, refuses=True)) as system:
        events, done, _ = await streamed(system)
        assert (events[-1]["error"]["code"], done) == ("replica_lost", False)
        await system.wait_until(lambda: system.nothing_left)


async def test_it_is_tried_as_often_as_a_request_may_be_tried():
    teller = Teller(*[1] * 9)
    async with gateway_before(teller) as system:
        events, done, _ = await streamed(system)
        assert (text_of(events), done) == ("0 1 2", False)
        assert events[-1]["error"]["code"] == "replica_lost"
        assert [body["max_tokens"] for body in teller.bodies] == [8, 7, 6]


async def test_messages_are_marked_in_their_own_shape():
    async with gateway_before(Teller(3)) as system:
        body = {"model": "far", "max_tokens": 8, "stream": True, "messages": [{"role": "user", "content": "Count."}]}
        response = await system.client.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"})
        data = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
        pieces = [event for event in data if event["type"] == "content_block_delta"]
        assert "".join(event["delta"]["text"] for event in pieces) == TEXT
        assert [event["delta"]["text"] for event in pieces if event.get("maitred")] == [" 3"]
        assert data[-1]["type"] == "message_stop"


@pytest.mark.parametrize("dialect", ["generic", "openai"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_server_that_takes_a_begun_answer_without_flags_goes_on_where_the_operator_says_so(dialect, path):
    teller = Teller(3)
    async with gateway_before(teller, dialect=dialect, continues=True) as system:
        events, done, clean = await streamed(system, path)
        assert (text_of(events), done, clean) == (TEXT, True, True)
        assert "continue_final_message" not in teller.bodies[1]


@asynccontextmanager
async def two_models(first, second, continuation="fallback", begun=None, **settings):
    """A gateway with the model `far` and its fallback `near`."""
    async with AsyncExitStack() as stack:
        models = {}
        for name, teller, how in (("far", first, begun or {}), ("near", second, {"dialect": "vllm", **settings})):
            url = (
                await stack.enter_async_context(running(teller.answer)) + "/v1" if hasattr(teller, "answer") else teller
            )
            upstream = UpstreamConfig(url=url, name=name, **how, **QUICK)
            models[name] = TextModelConfig(upstreams=[upstream], continuation=continuation if name == "far" else "none")
        routing = RoutingConfig(fallbacks={"far": FallbackConfig(general=["near"])})
        prices = {"far": PriceConfig(prompt=1, output=1), "near": PriceConfig(prompt=2, output=3)}
        yield await stack.enter_async_context(
            upstream_gateway("", models=models, routing=routing, retries=1, admitting=AdmissionConfig(prices=prices))
        )


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_goes_on_at_the_fallback_model_and_is_billed_as_one_answer(path, counts):
    first, second = Teller(3, counts=counts), Teller()
    async with two_models(first, second) as system:
        events, done, clean = await streamed(system, path)
        assert (text_of(events), done, clean) == (TEXT, True, True)
        assert [text_of([event]) for event in events if event.get("maitred") == {"continued": True}] == [" 3"]
        assert (len(first.bodies), [body["max_tokens"] for body in second.bodies]) == (1, [5])
        (context,) = system.contexts
        assert (context.continued, context.recoveries, context.fallbacks) == (1, 1, ["general=near"])
        await system.wait_until(lambda: system.nothing_left)
        begun, ended = sorted(system.ledger.events, key=lambda event: event.model)
        # Whoever broke off gets nothing; whoever ended it is paid for the whole answer, and for its prompt once.
        assert (begun.model, begun.outcome, begun.cost_nusd) == ("far", Outcome.FAILED, 0)
        assert (ended.model, ended.outcome, ended.output_tokens) == ("near", Outcome.FINISHED, 8)
        assert ended.prompt_tokens == pytest.approx(PROMPT_TOKENS, abs=0 if counts else 1)
        assert ended.cost_nusd == 2000 * ended.prompt_tokens + 3000 * 8
        assert events[-1]["usage"]["completion_tokens"] == 8
        assert events[-1]["usage"]["prompt_tokens"] == ended.prompt_tokens
        assert events[-1]["usage"].get("estimated", False) is not counts


async def test_an_engine_whose_model_thinks_ends_an_answer_within_the_thought_or_behind_it(tmp_path):
    teller = Teller()
    engine = {"kv_memory_bytes": 32 << 20, "threads": 1, "device": "cpu"}
    thinking = str(make_tool_model(tmp_path / "thinking", "thinking"))
    async with running(teller.answer) as url:
        models = {
            "far": {"upstreams": [{"url": f"{url}/v1", "kind": "openai"}], "continuation": "fallback"},
            "near": {"path": thinking, "engine": engine},
        }
        config = {"models": models, "residency": {"memory_bytes": 16 << 30}}
        path = tmp_path / "maitred.yaml"
        path.write_text(json.dumps(config | {"routing": {"fallbacks": {"far": {"general": ["near"]}}}}))
        with serving("--config", str(path)) as server:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                near = {"model": "near", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
                assert (await client.post("/v1/chat/completions", json=near)).status_code == 200
                for thoughts, breaks, begun in [(0, 3, "0 1 2"), (2, 4, " 2 3"), (4, 3, ""), (3, 3, "")]:
                    teller.thoughts, teller.breaks = thoughts, [breaks]
                    # Neither the end of the thought nor that of the turn: what follows stays what it is.
                    fields = {"logit_bias": {"4099": -100, "4": -100}, "temperature": 0, "max_tokens": 24}
                    events, done, clean = await streamed(SimpleNamespace(client=client), **fields)
                    assert (done, clean) == (True, True)
                    (first,) = [at for at, event in enumerate(events) if event.get("maitred") == {"continued": True}]
                    thought = [delta.get("reasoning_content") or "" for delta in deltas_of(events[first:])]
                    assert text_of(events[:first]) == begun
                    assert (bool("".join(thought)), bool(text_of(events[first:]))) == (not begun, bool(begun))
                    usage = events[-1]["usage"]
                    assert usage["completion_tokens"] == 24
                    details = usage.get("completion_tokens_details") or {}
                    assert bool(details.get("reasoning_tokens")) == bool(thoughts)


def deltas_of(events):
    return [choice["delta"] for event in events for choice in event.get("choices", ())]


async def test_a_fallback_model_that_breaks_is_followed_by_its_own_servers_only_if_it_may_be():
    first, second = Teller(3), Teller(2)
    async with two_models(first, second) as system:
        events, done, clean = await streamed(system)
        assert (text_of(events), done, clean) == ("0 1 2 3 4", False, False)
        assert events[-1]["error"]["code"] == "replica_lost"
        await system.wait_until(lambda: system.nothing_left)
        assert [event.cost_nusd for event in system.ledger.events] == [0, 0]


@pytest.mark.parametrize("continuation", ["none", "reprompt"])
async def test_two_models_write_one_answer_only_where_the_operator_allows_it(continuation):
    first, second = Teller(3, 3, 3, 3), Teller()
    begun = {"dialect": "vllm"} if continuation == "reprompt" else {}
    async with two_models(first, second, continuation=continuation, begun=begun) as system:
        events, done, _ = await streamed(system)
        assert (done, events[-1]["error"]["code"]) == (False, "replica_lost")
        assert second.bodies == []


async def test_a_whole_answer_is_that_of_one_model():
    first, second = Teller(3, 3, 3), Teller()
    async with two_models(first, second) as system:
        body = {"model": "far", "max_tokens": 8, "messages": [{"role": "user", "content": "Count."}]}
        answer = await system.client.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == TEXT
        assert [Teller.given(sent) for sent in second.bodies] == [""]


@pytest.mark.parametrize("refuses", [True, False])
async def test_a_fallback_model_that_cannot_go_on_is_no_fault_of_the_caller(refuses):
    second = Teller(refuses=refuses)
    async with two_models(Teller(3), second, dialect="vllm" if refuses else "generic") as system:
        events, done, _ = await streamed(system)
        assert (text_of(events), events[-1]["error"]["code"], done) == ("0 1 2", "replica_lost", False)
        assert len(second.bodies) == refuses
        await system.wait_until(lambda: system.nothing_left)


@pytest.mark.parametrize("continues", [True, False])
async def test_a_server_of_messages_goes_on_where_it_takes_a_begun_answer(continues):
    rest = anthropic_text(*(f" {number}" for number in range(3, 8)), prompt_tokens=PROMPT_TOKENS + 3)
    async with ScriptedAnthropic([Reply(rest)]) as server:
        more = {
            "kind": "anthropic",
            "dialect": "generic",
            "continues_answers": continues,
            "parameters": {"thinking": {"type": "adaptive"}},
        }
        async with two_models(Teller(3), server.url, **more) as system:
            events, done, _ = await streamed(system)
            assert (text_of(events), done) == ((TEXT, True) if continues else ("0 1 2", False))
            if continues:
                (asked,) = server.asked
                assert asked.body["messages"][-1] == {"role": "assistant", "content": "0 1 2"}
                assert "thinking" not in asked.body
                ended = next(event for event in system.ledger.events if event.outcome is Outcome.FINISHED)
                assert (ended.prompt_tokens, ended.output_tokens) == (PROMPT_TOKENS, 8)
