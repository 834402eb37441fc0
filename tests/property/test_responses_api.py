"""Whatever is sent to the Responses API is answered by its description or refused, and as other APIs answer it."""

import asyncio
import json
import os
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import jsonschema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from maitred.testing.script import ScriptedAnswer
from maitred.wire.sse import SSEDecoder
from tests.support.gateway import CARD, MODEL, gateway, tokens_of
from tests.support.stores import response_routes
from tests.support.tool_models import save_tool_tokenizer

EXAMPLES = int(os.environ.get("MAITRED_TEST_EXAMPLES", "10"))
EOS, END = 2, 4
ANSWER = ScriptedAnswer(tokens=[*tokens_of('{"a": "Hello there"}'), EOS])

WORDS = st.sampled_from(["", "a", "Hi there", "message", "user", "input_text", "call_1", "f", "{}"])
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)


def mostly(*right):
    """One of the right values, or rarely anything."""
    values = [value if isinstance(value, st.SearchStrategy) else st.just(value) for value in right]
    return st.integers(0, 24).flatmap(lambda chance: st.one_of(*values) if chance else ANY)


def objects(**members):
    return st.fixed_dictionaries({}, optional=members)


def members(**all_members):
    return st.fixed_dictionaries(all_members)


TEXT_PART = members(type=mostly("input_text", "output_text", "text"), text=mostly("Hi"))
PART = (
    TEXT_PART
    | TEXT_PART
    | objects(
        type=mostly("input_text", "output_text", "refusal", "text", "input_image"), text=mostly("Hi"), refusal=WORDS
    )
)
CONTENT = mostly("Hi", st.lists(PART, max_size=2))
ITEM = st.one_of(
    members(role=mostly("user", "assistant", "system", "developer"), content=CONTENT, type=mostly("message")),
    members(type=st.just("function_call"), call_id=WORDS, name=WORDS, arguments=mostly("{}")),
    members(type=st.just("function_call_output"), call_id=WORDS, output=CONTENT),
    members(type=st.just("custom_tool_call"), call_id=WORDS, name=WORDS, input=WORDS),
    members(type=st.just("custom_tool_call_output"), call_id=WORDS, output=CONTENT),
    objects(
        type=st.just("reasoning"), summary=mostly(st.just([])), content=ANY, encrypted_content=mostly("maitred1.W10=")
    ),
    objects(type=mostly("web_search_call", "mcp_call"), id=mostly("msg_1_0")),
    objects(type=st.just("compaction"), encrypted_content=mostly("a", "maitred-c1.", "maitred-c1.YWJj")),
)
TOOL = st.fixed_dictionaries(
    {"type": mostly("function", "custom", "web_search"), "name": mostly("f", "g")},
    optional={
        "description": mostly("d"),
        "parameters": mostly(st.just({"type": "object", "properties": {}})),
        "strict": mostly(True, False),
    },
)
CHOICE = mostly(
    "auto",
    "none",
    "required",
    objects(type=mostly("function", "allowed_tools"), name=mostly("f"), mode=mostly("auto"), tools=ANY),
)
SCHEMA = mostly({"type": "object"}, {"type": "object", "properties": {"a": {"type": "string"}}})
BODY = objects(
    instructions=mostly("Be kind."),
    tools=mostly(st.lists(TOOL, max_size=2)),
    tool_choice=CHOICE,
    text=objects(
        format=mostly(
            {"type": "text"}, {"type": "json_object"}, objects(type=mostly("json_schema"), schema=SCHEMA, name=WORDS)
        ),
        verbosity=WORDS,
    ),
    reasoning=objects(effort=mostly("low", "none"), summary=mostly("auto")),
    max_output_tokens=mostly(st.integers(1, 20)),
    temperature=mostly(st.floats(0, 2)),
    top_p=mostly(st.floats(0.1, 1)),
    top_logprobs=mostly(st.integers(0, 20)),
    include=mostly(["message.output_text.logprobs"], ["reasoning.encrypted_content"]),
    metadata=mostly({}, {"a": "b"}),
    store=mostly(True, False),
    stream=mostly(True, False),
    parallel_tool_calls=mostly(True, False),
    previous_response_id=st.sampled_from([None, None, None, "resp_1"]),
    truncation=mostly("auto", "disabled"),
    service_tier=mostly("auto", "flex"),
    stop=mostly("x", ["x"]),
    seed=mostly(3),
    max_tool_calls=mostly(2),
    context_management=mostly([], [{"type": "compaction", "compact_threshold": 1}]),
    user=mostly("u"),
    background=mostly(True, False),
    extra=ANY,
).flatmap(lambda body: st.builds(lambda given: {"input": given, **body}, mostly("Hi", st.lists(ITEM, max_size=4))))


@asynccontextmanager
async def serving(answers, **options):
    with TemporaryDirectory() as folder:
        async with response_routes(Path(folder)) as further, gateway(answers, further=further, **options) as system:
            yield system


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(BODY, min_size=1, max_size=20))
def test_any_request_is_answered_by_the_description_or_refused(bodies):
    async def ask():
        async with serving([ANSWER]) as system:
            described = (await system.client.get("/openapi.json")).json()
            response_of = jsonschema.Draft202012Validator(
                {"$ref": "#/components/schemas/ResponseResource", "components": described["components"]}
            )
            event_of = jsonschema.Draft202012Validator(
                {"$ref": "#/components/schemas/ResponseEvent", "components": described["components"]}
            )
            for body in bodies:
                answer = await system.client.post("/v1/responses", json={"model": MODEL, **body})
                if answer.status_code != 200:
                    assert answer.status_code == 400, (body, answer.text)
                    assert answer.json()["error"]["message"], body
                elif answer.headers["content-type"].startswith("text/event-stream"):
                    *events, done = [event.data for event in SSEDecoder().feed(answer.content)]
                    assert done == "[DONE]"
                    for event in map(json.loads, events):
                        event_of.validate(event)
                    response_of.validate(event["response"])
                    assert event["response"]["status"] in ("completed", "incomplete")
                else:
                    response_of.validate(answer.json())

    asyncio.run(ask())


TEXTS = st.text("ab \n{}<>", max_size=8)
WRITTEN = st.one_of(
    TEXTS,
    st.builds(
        lambda text, at: (
            f'{text}<tool_call>\n{{"name": "look", "arguments": {{"at": {json.dumps(at)}}}}}\n</tool_call>'
        ),
        TEXTS,
        TEXTS,
    ),
    st.builds(
        lambda at: f'<tool_call>\n{{"name": "look", "arguments": {{"at": {json.dumps(at)}}}}}\n</tool_call>\n' * 2,
        TEXTS,
    ),
)
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(written=WRITTEN, most=st.integers(1, 60), streams=st.booleans(), asked=TEXTS)
def test_all_apis_say_the_same(tmp_path_factory, written, most, streams, asked):
    """Of one answer: its text, its calls, why it ended, and what it cost."""
    tokenizer = _tokenizer(tmp_path_factory)

    async def ask():
        card = replace(CARD, vocab_size=tokenizer.vocab_size, eos_token_ids=(END,), context_tokens=4096)
        tokens = [*tokenizer.encode(written, add_special_tokens=False), END]
        async with serving([ScriptedAnswer(tokens=tokens)], tokenizer=tokenizer, card=card) as system:
            messages = [{"role": "user", "content": f"Q {asked}"}]
            chat = await system.client.post(
                "/v1/chat/completions",
                json={
                    "model": MODEL,
                    "messages": messages,
                    "max_tokens": most,
                    "tools": [{"type": "function", "function": LOOK}],
                },
            )
            responses = await system.client.post(
                "/v1/responses",
                json={
                    "model": MODEL,
                    "input": messages,
                    "max_output_tokens": most,
                    "tools": [{"type": "function", **LOOK}],
                    "stream": streams,
                },
            )
            anthropic = await system.client.post(
                "/v1/messages",
                json={
                    "model": MODEL,
                    "messages": messages,
                    "max_tokens": most,
                    "tools": [{"name": "look", "input_schema": LOOK["parameters"]}],
                },
                headers={"anthropic-version": "2023-06-01"},
            )
            assert len({tuple(request.prompt) for request in system.engine.submitted}) == 1
            return chat.json(), responses, anthropic.json()

    chat, responses, anthropic = asyncio.run(ask())
    (choice,) = chat["choices"]
    if streams:
        response = json.loads([event.data for event in SSEDecoder().feed(responses.content)][-2])["response"]
    else:
        response = responses.json()
    text = "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])
    assert text == (choice["message"]["content"] or "")
    calls = [(item["name"], item["arguments"]) for item in response["output"] if item["type"] == "function_call"]
    assert calls == [
        (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"].get("tool_calls", ())
    ]
    assert (response["status"] == "incomplete") == (choice["finish_reason"] == "length")
    assert (anthropic["stop_reason"] == "max_tokens") == (choice["finish_reason"] == "length")
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (
        chat["usage"]["prompt_tokens"],
        chat["usage"]["completion_tokens"],
    )
    assert anthropic["usage"]["output_tokens"] == usage["output_tokens"]
    if choice["finish_reason"] != "length":
        said = "".join(block["text"] for block in anthropic["content"] if block["type"] == "text")
        assert said == text
        assert [json.loads(arguments) for _, arguments in calls] == [
            block["input"] for block in anthropic["content"] if block["type"] == "tool_use"
        ]


_TOKENIZERS: list = []


def _tokenizer(tmp_path_factory):
    if not _TOKENIZERS:
        _TOKENIZERS.append(save_tool_tokenizer(tmp_path_factory.mktemp("hermes"), "hermes"))
    return _TOKENIZERS[0]
