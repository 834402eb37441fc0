"""Random weights call tools as these are declared: a real server, real engines, and the official clients.

What such models say is noise, so whatever is in order here has been held to it.
"""

import asyncio
import json

import anthropic
import jsonschema
import openai
import pytest

from maitred.testing.server_process import serving
from tests.support.tool_models import make_tool_model

FAMILIES = ("hermes", "thinking", "llama", "mistral", "old_mistral")
LOOK = {
    "type": "object",
    "properties": {
        "at": {"$ref": "#/$defs/place"},
        "times": {"type": "integer", "minimum": 1, "maximum": 20},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["at", "note"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["sky", 'the "sea"', "空"]}},
}
GO = {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"], "additionalProperties": False}
SCHEMAS = {"look": LOOK, "go": GO}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": name == "go"}}
    for name, schema in SCHEMAS.items()
]
USER = [{"role": "user", "content": "What is up there?"}]
SEEDS = range(3)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    engine = {"kv_memory_bytes": 32 << 20, "threads": 1, "device": "cpu"}
    models = {family: {"path": str(make_tool_model(folder / family, family)), "engine": engine} for family in FAMILIES}
    config = {"models": models, "residency": {"memory_bytes": 16 << 30}}
    path = folder / "maitred.yaml"
    path.write_text(json.dumps(config))
    with serving("--config", str(path)) as running:
        yield running


def openai_client(server):
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2, timeout=300)


def check(calls):
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


async def of_each(ask):
    """One question to every family with every seed, all at once."""
    return await asyncio.gather(*(ask(family, seed) for family in FAMILIES for seed in SEEDS))


def asked(family, seed, **fields):
    # Thoughts and texts that end where they please would be all that random weights write.
    biased = {"logit_bias": {"4099": 100}} if family == "thinking" else {}
    return {"model": family, "messages": USER, "tools": TOOLS, "seed": seed, "max_tokens": 400, **biased, **fields}


async def test_what_is_required_is_called(server):
    async with openai_client(server) as client:

        async def call(family, seed):
            fields = asked(family, seed, tool_choice="required", max_tokens=120)
            (choice,) = (await client.chat.completions.create(**fields)).choices
            calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
            if choice.finish_reason == "tool_calls":
                assert choice.message.content is None
                return calls
            # Nothing keeps a model from calling again and again, until it has no tokens left in the middle of a call.
            assert choice.finish_reason == "length"
            return calls[:-1]

        several = await of_each(call)
        for calls in several:
            check(calls)
        assert {name for calls in several for name, _ in calls} == set(SCHEMAS)
        assert max(map(len, several)) > 1

        async def call_once(family, seed):
            fields = asked(family, seed, tool_choice="required", parallel_tool_calls=False)
            (choice,) = (await client.chat.completions.create(**fields)).choices
            assert choice.finish_reason == "tool_calls"
            return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]

        for calls in await of_each(call_once):
            assert len(calls) == 1
            check(calls)


async def test_the_function_that_is_named_is_called_in_a_stream_too(server):
    named = {"type": "function", "function": {"name": "look"}}
    async with openai_client(server) as client:

        async def call(family, seed):
            stream = await client.chat.completions.create(**asked(family, seed, tool_choice=named), stream=True)
            chunks = [chunk.choices[0] async for chunk in stream]
            pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or ()]
            assert [piece.function.name for piece in pieces if piece.id] == ["look"]
            assert chunks[-1].finish_reason == "tool_calls"
            return [("look", "".join(piece.function.arguments for piece in pieces))]

        for calls in await of_each(call):
            check(calls)


async def test_a_message_uses_tools(server):
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", timeout=300) as client:
        for family in ("hermes", "llama", "mistral"):
            async with client.messages.stream(
                model=family,
                messages=USER,
                tools=tools,
                tool_choice={"type": "any", "disable_parallel_tool_use": True},
                max_tokens=400,
            ) as stream:
                message = await stream.get_final_message()
            assert message.stop_reason == "tool_use"
            for block in message.content:
                jsonschema.validate(block.input, SCHEMAS[block.name])


async def test_who_may_call_and_begins_to_calls_as_it_must(server):
    """The token that begins a call is made likely; from there the model is held to the tools."""
    begins = {"hermes": 4096, "llama": 4096, "mistral": 4096, "old_mistral": 4096}
    async with openai_client(server) as client:
        for family, token in begins.items():
            fields = asked(family, 1, logit_bias={str(token): 100}, parallel_tool_calls=False)
            answer = await client.chat.completions.create(**fields)
            check((call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls)
            assert answer.choices[0].finish_reason == "tool_calls"


async def test_a_form_of_the_answer_and_calls_go_together(server):
    form = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "form", "schema": form, "strict": True}}
    async with openai_client(server) as client:

        async def answer_to(family, seed):
            fields = asked(family, seed, response_format=wanted, parallel_tool_calls=False)
            answer = await client.chat.completions.create(**fields)
            message = answer.choices[0].message
            if message.tool_calls:
                check((call.function.name, call.function.arguments) for call in message.tool_calls)
            else:
                jsonschema.validate(json.loads(message.content), form)
            return bool(message.tool_calls)

        await of_each(answer_to)


async def test_a_schema_that_cannot_be_had_is_refused_with_the_tools_name(server):
    odd = {"type": "object", "properties": {"a": {"not": {"pattern": "a"}}}}
    tools = [TOOLS[1], {"type": "function", "function": {"name": "odd", "parameters": odd, "strict": True}}]
    broken = [{"type": "function", "function": {"name": "broken", "parameters": {"properties": {"a": {"type": "no"}}}}}]
    async with openai_client(server) as client:
        for name, param, wrong in (
            ("odd", "tools[1].function.parameters", tools),
            ("broken", "tools[0].function.parameters", broken),
        ):
            with pytest.raises(openai.BadRequestError, match=f"The tool '{name}' cannot be called") as caught:
                await client.chat.completions.create(**asked("hermes", 0, tools=wrong))
            assert caught.value.param == param
        # What is not strict is held to what can be held of it.
        lenient = [{"type": "function", "function": {"name": "odd", "parameters": odd}}]
        answer = await client.chat.completions.create(**asked("hermes", 0, tools=lenient, max_tokens=3))
        assert answer.choices[0].finish_reason == "length"
