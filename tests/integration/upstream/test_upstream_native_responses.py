"""Responses of a server that speaks the API itself: nothing is lost between it and its client, and all is accounted."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.admission.config import AdmissionConfig, PriceConfig
from maitred.api.config import ServerConfig
from maitred.api.in_flight import InFlightLimiter
from maitred.api.responses.websocket import ResponsesWebSockets
from maitred.config.tree import TextModelConfig
from maitred.core.clock import SystemClock
from maitred.core.context import Outcome
from maitred.core.errors import MaitredError
from maitred.core.limits import Limit, LimitKind
from maitred.core.secret import Secret
from maitred.core.tenancy import Principal, Scope
from maitred.replica.upstream.config import UpstreamConfig
from maitred.replica.upstream.event_stream import EventStreamParser
from maitred.routing.config import RoutingConfig
from maitred.routing.pools.config import FallbackConfig
from maitred.testing.scripted_responses import (
    Reply,
    ScriptedResponses,
    call,
    failure,
    message,
    reasoning,
    response,
    stream,
)
from maitred.wire.responses.answer import ResponsesStreamParser
from tests.integration.upstream.test_upstream_passing import Server, chunk, running
from tests.support.stores import response_routes
from tests.support.upstream_gateway import MODEL, upstream_gateway

SEARCH = {"id": "ws_1", "type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "fox"}}
ODD = {"id": "odd_1", "type": "hologram_call", "shape": {"a": 1}}
THOUGHT = reasoning("Think", "ing.", encrypted="gAAA")
ITEMS = [THOUGHT, SEARCH, ODD, message("Hello", " there"), call("look", '{"a"', ":1}")]
RAW = response(*ITEMS)["output"]
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
HOSTED = [
    {"type": "web_search", "search_context_size": "low"},
    {"type": "file_search", "vector_store_ids": ["vs_1"]},
    {
        "type": "mcp",
        "server_label": "m",
        "server_url": "https://mcp.e.x",
        "authorization": "t0k3n",
        "headers": {"x": "t0k3n"},
    },
    {"type": "image_generation"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
]
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}}
REASONS = {"effort": "low", "summary": "auto"}
SCREEN = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA=="}
ASKED = {
    "model": MODEL,
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}]},
        {"type": "message", "role": "user", "content": [{"type": "input_file", "file_id": "file_1"}], "of": "tomorrow"},
        {"type": "reasoning", "id": "rs_0", "summary": [], "encrypted_content": "gBBB"},
        {"type": "computer_call_output", "call_id": "c", "output": SCREEN},
        {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True},
    ],
    "tools": [LOOK, PATCH, *HOSTED],
    "tool_choice": {"type": "web_search"},
    "include": ["reasoning.encrypted_content", "a.part.of.tomorrow"],
    "reasoning": REASONS,
    "text": {"verbosity": "low"},
    "truncation": "auto",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "service_tier": "flex",
    "max_tool_calls": 3,
    "prompt": {"id": "pmpt_1"},
    "max_output_tokens": 50,
    "a_field_of_tomorrow": {"x": 1},
}


@asynccontextmanager
async def behind(folder, *replies, **options):
    """A gateway before a server with these replies, with the server and an official client."""
    async with ScriptedResponses(replies) as server, response_routes(folder) as further:
        settings_of_server = {"dialect": "openai", "responses": True}
        options = {"further": further, **settings_of_server, **options}
        async with upstream_gateway(server.url, **options) as system, client_of(system) as client:
            yield system, server, client
            await system.wait_until(lambda: system.nothing_left)


def client_of(system):
    return openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0)


def events_in(text):
    """Events of a raw stream."""
    blocks = [block.partition("data: ")[2] for block in text.split("\n\n")]
    return [json.loads(data) for data in blocks if data.startswith("{")]


async def test_everything_that_a_client_says_reaches_the_server(tmp_path):
    async with behind(tmp_path, Reply(stream(*ITEMS))) as (system, server, _):
        for streams in (False, True):
            decided = {"metadata": {"a": "b"}, "stream": streams, "background": False, "user": "u", "priority": 3}
            answer = await system.client.post("/v1/responses", json={**ASKED, **decided})
            assert answer.status_code == 200, answer.text
            assert "x-maitred-ignored" not in answer.headers
            assert "t0k3n" not in answer.text, "it is kept nowhere"
            typed = [{"type": "message", **ASKED["input"][0]}, *ASKED["input"][1:]]
            assert server.asked[-1].body == {**ASKED, "input": typed, "store": False, "stream": True, "user": "u"}
            assert server.asked[-1].path == "/v1/responses"
        assert [event.output_tokens for event in system.ledger.events] == [5, 5]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("stores", [False, True])
async def test_items_of_the_server_survive_turns(tmp_path, streams, stores):
    """Hosted tools, unknown items and encrypted reasoning, kept here or by the client."""
    asked = {"model": MODEL, "tools": [LOOK, *HOSTED], "reasoning": REASONS, "store": stores, "metadata": {"a": "b"}}
    if not stores:
        asked["include"] = ["reasoning.encrypted_content"]
    reply = Reply(stream(*ITEMS, service_tier="flex", their="own", instructions="x", output_tokens=7))
    async with behind(tmp_path, reply) as (_, server, client):
        if streams:
            got = [event async for event in await client.responses.create(**asked, input="Hi", stream=True)]
            first = got[-1].response
            assert [event.sequence_number for event in got] == [*range(27)]
            assert "response.web_search_call.in_progress" in {event.type for event in got}
        else:
            first = await client.responses.create(**asked, input="Hi")
        assert (first.id[:5], first.model, first.store) == ("resp_", MODEL, stores)
        assert (first.metadata, first.instructions, first.service_tier, first.their) == (
            {"a": "b"},
            None,
            "flex",
            "own",
        )
        assert (first.usage.input_tokens, first.usage.output_tokens) == (10, 7)
        assert (first.usage.input_tokens_details.cached_tokens, first.usage.total_tokens) == (4, 17)
        assert first.usage.output_tokens_details.reasoning_tokens == 2
        shown = [item.model_dump(exclude_unset=True, warnings=False) for item in first.output]
        assert [item["id"] for item in shown] == [item["id"] for item in RAW]
        assert ("encrypted_content" in shown[0]) is not stores
        result = {"type": "function_call_output", "call_id": "call_1", "output": "7"}
        if stores:
            second = await client.responses.create(**asked, input=[result], previous_response_id=first.id)
            assert second.previous_response_id == first.id
            references = [{"type": "item_reference", "id": item["id"]} for item in RAW]
            await client.responses.create(**asked, input=[{"role": "user", "content": "Hi"}, *references, result])
            assert server.asked[2].body["input"][1:] == [*RAW, result]
            stored = await client.responses.retrieve(first.id)
            assert stored.output == first.output
            replayed = [event async for event in await client.responses.retrieve(first.id, stream=True)]
            assert replayed[-1].response.output == first.output
        else:
            await client.responses.create(**asked, input=[{"role": "user", "content": "Hi"}, *shown, result])
    for request in server.asked:
        assert request.body["include"] == ["reasoning.encrypted_content"]
        assert request.body["store"] is False
        assert {"previous_response_id", "metadata"}.isdisjoint(request.body)
    sent = server.asked[1].body["input"]
    assert (sent[0]["role"], sent[1:6], sent[6]) == ("user", RAW, result)


async def test_a_model_that_is_seen_to_reason_is_asked_for_its_reasoning(tmp_path):
    plain = Reply(stream(message("So.")))
    async with behind(tmp_path, plain, Reply(stream(reasoning("Hm."), message("So."))), plain) as (_, server, client):
        for _ in range(3):
            await client.responses.create(model=MODEL, input="Hi")
        await client.responses.create(model=MODEL, input="Hi", store=False)
    assert ["include" in request.body for request in server.asked] == [False, False, True, False]


async def test_the_oldest_turns_are_dropped_where_the_server_does_not_do_it(tmp_path):
    too_long = Reply(status=400, error=("invalid_request_error", "This exceeds the context window."))
    turns = [{"role": "user", "content": text} for text in ("a" * 90, "b" * 90, "c")]
    asked = {"model": MODEL, "input": [{"role": "developer", "content": "Be kind."}, *turns], "truncation": "auto"}
    async with behind(tmp_path, too_long, Reply(stream(message("So.")))) as (_, server, client):
        assert (await client.responses.create(**asked)).output_text == "So."
    sent = [[item["content"] for item in request.body["input"]] for request in server.asked]
    assert sent == [["Be kind.", "a" * 90, "b" * 90, "c"], ["Be kind.", "b" * 90, "c"]]


async def test_what_other_models_have_said_is_sent_as_the_server_takes_it(tmp_path):
    """The first turn is answered by a server of chat completions, the second by one of responses, the third by both."""
    piece = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    other = Server(
        [
            chunk(reasoning_content="Hm."),
            chunk(content="So."),
            chunk(tool_calls=[{**piece, "extra_content": {"google": {}}}]),
            chunk(finish="tool_calls"),
        ]
    )
    async with (
        ScriptedResponses([Reply(stream(*ITEMS)), Reply(status=503)]) as server,
        running(other.answer) as url,
        response_routes(tmp_path) as further,
    ):
        models = {
            "far": TextModelConfig(upstreams=[UpstreamConfig(url=server.url, dialect="openai", responses=True)]),
            "near": TextModelConfig(upstreams=[UpstreamConfig(url=f"{url}/v1")]),
        }
        routing = RoutingConfig(fallbacks={"far": FallbackConfig(general=["near"])})
        gateway = upstream_gateway("", models=models, routing=routing, further=further)
        async with gateway as system, client_of(system) as client:
            asked = {"tools": [LOOK, *HOSTED], "reasoning": REASONS}
            first = await client.responses.create(model="near", input="Hi", **asked)
            result = {"type": "function_call_output", "call_id": "call_1", "output": "7"}
            told = await client.responses.with_raw_response.create(
                model="far", input=[result], previous_response_id=first.id, **asked
            )
            assert told.headers["x-maitred-ignored"] == "input (reasoning)"
            second = told.parse()
            sent = server.asked[0].body["input"]
            assert sent[0] == {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
            text = {"type": "output_text", "text": "So.", "annotations": []}
            assert sent[1] == {"type": "message", "role": "assistant", "content": [text]}
            assert sent[2] == {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}
            assert sent[3] == {"type": "function_call_output", "call_id": "call_1", "output": "7"}
            assert len(sent) == 4

            # The server is away: the fallback gets what it can read, and what it cannot is named.
            told = await client.responses.with_raw_response.create(
                model="far", input="And?", previous_response_id=second.id, **asked
            )
            assert told.parse().model == "near"
            assert "tools[1] (web_search)" in told.headers["x-maitred-ignored"]
            assert "conversation (hologram_call)" in told.headers["x-maitred-ignored"]
            turn = other.bodies[-1]["messages"][3]
            assert (turn["content"], turn["reasoning_content"]) == ("Hello there", "Thinking.")
            assert [tool["function"]["name"] for tool in other.bodies[-1]["tools"]] == ["look"]
            with pytest.raises(openai.APIStatusError) as refused:
                await client.responses.create(model="far", input=ASKED["input"][3:4], **asked)
            assert refused.value.status_code == 503, "the model that was asked for could have read it"
            with pytest.raises(openai.BadRequestError, match="computer_call_output") as refused:
                await client.responses.create(model="near", input=ASKED["input"][3:4], **asked)
            assert refused.value.param == "input[0]"
            for field in ("prompt", "tool_choice", "include"):
                with pytest.raises(openai.BadRequestError, match=field):
                    await client.responses.create(model="near", input="Hi", extra_body={field: ASKED[field]})


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_beyond_its_grant_is_cut_and_none_is_paid(tmp_path, streams):
    """By a server that ignores the limit, and says afterwards that it has counted nothing."""
    words = [f" word{number}" for number in range(400)]
    lying = Reply(stream(THOUGHT, message(*words), output_tokens=0))
    budget = Limit(id="budget", subject="*", kind=LimitKind.USD_TOTAL, value=400_000)
    prices = AdmissionConfig(prices={"*": PriceConfig(prompt=1, output=5)}, least_output_tokens=1)
    async with behind(tmp_path, lying, limited=[budget], admitting=prices) as (system, server, client):
        asked = {"model": MODEL, "input": "Hi", "max_output_tokens": 1000}
        if streams:
            events = [event async for event in await client.responses.create(**asked, stream=True)]
            cut = events[-1].response
            assert [event.type for event in events[-2:]] == ["response.output_item.done", "response.incomplete"]
        else:
            cut = await client.responses.create(**asked)
        (billed,) = system.ledger.events
        assert billed.output_tokens == server.asked[0].body["max_output_tokens"] < 80
        assert billed.cost_nusd <= 400_000
        assert cut.usage.estimated
        assert (cut.usage.output_tokens, cut.status) == (billed.output_tokens, "incomplete")
        assert cut.incomplete_details.reason == "max_output_tokens"
        assert cut.output[-1].status == "incomplete"
        assert cut.output_text
        assert "".join(words).startswith(cut.output_text)
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(**asked)


FIRST = stream(message("Hello", " there"))
REFUSALS = {
    "the request": (Reply(status=400, error=("invalid_request_error", "No such voice.")), 400, "No such voice."),
    "a file": (Reply(status=404, error=("invalid_request_error", "No vector store vs_1.")), 400, "vs_1"),
    "no such path": (Reply(status=404, error=("", "Not Found")), 503, "Responses API"),
    "no such method": (Reply(status=405, error=("", "Method Not Allowed")), 503, "Responses API"),
    "busy": (Reply(status=429, error=("rate_limit_error", "Slow down.")), 503, "Retry-After"),
    "an error event": (Reply([{"type": "error", "code": "server_error", "message": "Oh."}]), 502, "failed"),
    "a failed response": (Reply([*FIRST[:2], failure("invalid_prompt", "Not this.")]), 400, "Not this."),
    "a response without room": (Reply([*FIRST[:2], failure("rate_limit_exceeded", "Later.")]), 503, "Retry-After"),
    "no end": (Reply(FIRST[:2]), 502, "failed"),
    "cut": (Reply(FIRST[:1], cut=True), 502, "failed"),
}


async def test_a_failure_before_the_answer_is_told_as_for_chat(tmp_path):
    replies = [reply for refusal, _, _ in REFUSALS.values() for reply in (refusal, Reply(FIRST))]
    async with behind(tmp_path, *replies) as (system, _, client):
        for number, (name, (_, status, words)) in enumerate(REFUSALS.items()):
            asked = {"model": MODEL, "input": "Hi", "stream": number % 2 == 1}
            answer = await system.client.post("/v1/responses", json=asked)
            assert (answer.status_code, words in answer.text) == (status, True), (name, answer.text)
            assert (await client.responses.create(model=MODEL, input="Hi")).output_text == "Hello there"
        failed = [event for event in system.ledger.events if event.outcome is not Outcome.FINISHED]
        assert len(failed) == len(REFUSALS)
        assert sum(event.prompt_tokens + event.output_tokens for event in failed) == 0


BREAKS = {
    "cut": Reply(FIRST[:6], cut=True),
    "ended": Reply(FIRST[:6]),
    "failed": Reply([*FIRST[:6], failure("server_error", "Oh.")]),
    "an error": Reply([*FIRST[:6], {"type": "error", "code": "server_error", "message": "Oh."}]),
    "no JSON": Reply([*FIRST[:6], "data: {nonsense\n\n"]),
}


async def test_an_answer_that_breaks_never_looks_whole(tmp_path):
    replies = [reply for broken in BREAKS.values() for reply in (broken, Reply(FIRST))]
    async with behind(tmp_path, *replies) as (system, _, client):
        for name in BREAKS:
            sent, is_cut = b"", False
            asked = {"model": MODEL, "input": "Hi", "stream": True}
            try:
                async with system.client.stream("POST", "/v1/responses", json=asked) as answer:
                    async for piece in answer.aiter_bytes():
                        sent += piece
            except httpx.RemoteProtocolError:
                is_cut = True
            # If all of it came at once, nothing had been passed on yet.
            assert is_cut or answer.status_code == 502, name
            assert b"[DONE]" not in sent
            if is_cut:
                events = events_in(sent.decode())
                assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
                assert [item["status"] for item in events[-1]["response"]["output"]] == ["incomplete"]
            assert (await client.responses.create(model=MODEL, input="Hi")).output_text == "Hello there"
        lines = system.ledger.events
        assert [line.charges for line in lines if line.outcome is not Outcome.FINISHED] == [{}] * (len(lines) - 5)


async def test_a_whole_answer_in_place_of_a_stream_is_one(tmp_path):
    whole = json.dumps(response(*ITEMS))
    async with behind(tmp_path, Reply([whole], content_type="application/json")) as (system, _, client):
        assert (await client.responses.create(model=MODEL, input="Hi")).output_text == "Hello there"
        async for event in await client.responses.create(model=MODEL, input="Hi", stream=True):
            last = event
        assert [item.id for item in last.response.output] == [item["id"] for item in RAW]
        assert [event.output_tokens for event in system.ledger.events] == [5, 5]


async def test_it_goes_on_in_the_background_and_over_a_websocket(tmp_path):
    async with response_routes(tmp_path) as routes:
        sockets = ResponsesWebSockets(ServerConfig(port=0), InFlightLimiter(9), SystemClock())
        more = {"further": lambda pipeline: [*routes(pipeline), *sockets.routes()]}
        async with behind(tmp_path / "other", Reply(stream(*ITEMS)), **more) as (system, server, client):
            asked = {"model": MODEL, "reasoning": REASONS}
            conversation = (await client.conversations.create()).id
            running_one = await client.responses.create(**asked, input="Hi", background=True, conversation=conversation)
            async with asyncio.timeout(300):
                while running_one.status in ("queued", "in_progress"):
                    await asyncio.sleep(0.02)
                    running_one = await client.responses.retrieve(running_one.id)
            assert (running_one.background, running_one.output_text) == (True, "Hello there")
            await client.responses.create(**asked, input="And?", conversation=conversation)
            before = None
            async with client.responses.connect() as connection:
                for _ in range(2):
                    await connection.response.create(**asked, input="Hi", store=False, previous_response_id=before)
                    async for event in connection:
                        if event.type == "response.completed":
                            break
                    assert [item.id for item in event.response.output] == [item["id"] for item in RAW]
                    before = event.response.id
            assert "background" not in server.asked[0].body
            for request in (server.asked[1], server.asked[3]):
                assert request.body["input"][1:6] == RAW
                assert request.body["store"] is False
            assert len(system.ledger.events) == 4


async def test_another_tenant_goes_on_with_nothing(tmp_path):
    async with behind(tmp_path, Reply(stream(*ITEMS))) as (system, server, client):
        first = await client.responses.create(model=MODEL, input="Hi")
        stranger = Principal(key="k", tenants=("b",), scopes=frozenset({Scope.INFERENCE}))
        assert system.gate.count == 0
        async with response_routes(tmp_path) as further:
            options = {"dialect": "openai", "responses": True, "further": further, "principal": stranger}
            async with upstream_gateway(server.url, **options) as other, client_of(other) as their_client:
                with pytest.raises(openai.NotFoundError):
                    await their_client.responses.retrieve(first.id)
                with pytest.raises(openai.BadRequestError, match="not found"):
                    await their_client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
                with pytest.raises(openai.BadRequestError, match="no item"):
                    await their_client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_1"}])
        assert len(server.asked) == 1


async def test_the_credential_is_masked_in_whatever_the_server_says(tmp_path):
    secret = "sk-secret-0123456789"
    spelt = message("It is sk-secr", "et-01234", "56789.", annotations=[{"type": "note", "text": secret}])
    items = [
        reasoning("sk-secret", "-0123456789"),
        {**SEARCH, "of": secret},
        spelt,
        call("look", '"sk-sec', 'ret-0123456789"'),
    ]
    async with behind(tmp_path, Reply(stream(*items, their=secret)), api_key=Secret(secret, "{env: KEY}")) as (
        system,
        server,
        _,
    ):
        for streams in (False, True):
            asked = {"model": MODEL, "input": "Hi", "stream": streams}
            answer = await system.client.post("/v1/responses", json=asked)
            assert answer.status_code == 200
            assert secret not in answer.text
        texts = {}
        for event in events_in(answer.text):
            if event["type"].endswith(".delta"):
                texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        assert texts == {"rs_1": "*" * 20, "msg_1": f"It is {'*' * 20}.", "fc_1": f'"{"*" * 20}"'}
        assert server.asked[0].headers["authorization"] == f"Bearer {secret}"


async def test_clients_of_other_apis_ask_such_a_server_for_chat_completions():
    server = Server([chunk(content="x"), chunk(finish="stop")])
    async with (
        running(server.answer) as url,
        upstream_gateway(f"{url}/v1", dialect="openai", responses=True) as system,
    ):
        assert (await system.chat()).json()["choices"][0]["message"]["content"] == "x"
    assert server.bodies[0]["messages"][0]["role"] == "user"


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_stream_in_any_pieces_is_the_same_answer_and_a_part_of_it_is_none(data):
    events = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in stream(*ITEMS)]
    sent = "".join(events).encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sent) - 1), max_size=6)))
    parser, deltas = EventStreamParser("there", ResponsesStreamParser(MODEL)), []
    for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        batch = parser.feed(sent[begin:end])
        deltas += batch.parts if batch is not None else []
    assert parser.is_complete
    assert "".join(delta.text for delta in deltas) == "Hello there"
    assert deltas[-1].block["response"]["output"][1:] == RAW[1:]
    shorter = EventStreamParser("there", ResponsesStreamParser(MODEL))
    shorter.feed("".join(events[: data.draw(st.integers(0, len(events) - 1))]).encode())
    with pytest.raises(MaitredError):
        shorter.on_end(is_framed=True)
