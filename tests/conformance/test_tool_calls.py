"""The official clients get calls of tools, and thoughts, from what models of each family write."""

import asyncio
import json

import anthropic
import openai
import pytest
from msgspec.structs import replace

from maitred.testing.script import AnswerFault, ScriptedAnswer
from maitred.wire.anthropic.context_edits import CLEARED
from tests.support.gateway import CARD, MODEL, gateway
from tests.support.tool_models import save_tool_tokenizer

END = 4
LOOK = {
    "name": "look",
    "description": "Look at something.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
}
GO = {"name": "go", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": LOOK}, {"type": "function", "function": GO}]
ANTHROPIC_TOOLS = [
    {"name": tool["name"], "description": tool.get("description", "None."), "input_schema": tool["parameters"]}
    for tool in (LOOK, GO)
]


def as_tool(tool):
    """The same in OpenAI's words."""
    function = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


USER = [{"role": "user", "content": "What is up there?"}]
SKY = {"at": 'the "sky" — 空'}
GIVEN = json.dumps(SKY, ensure_ascii=False)
WRITTEN = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "look", "arguments": %s}\n</tool_call>\n'
    '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>',
    "llama": '{"name": "look", "parameters": %s}; {"name": "go", "parameters": {}}',
    "mistral": "Let me see.[TOOL_CALLS]look[ARGS]%s[TOOL_CALLS]go[ARGS]{}",
    "old_mistral": '[TOOL_CALLS] [{"name": "look", "arguments": %s}, {"name": "go", "arguments": {}}]',
}
FAMILIES = sorted(WRITTEN)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {family: save_tool_tokenizer(tmp_path_factory.mktemp(family), family) for family in (*FAMILIES, "thinking")}


def system(tokenizer, text):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    card = replace(CARD, vocab_size=tokenizer.vocab_size, eos_token_ids=(END,), context_tokens=4096)
    return gateway([ScriptedAnswer(tokens=[*tokens, END])], tokenizer=tokenizer, card=card)


def openai_client(running):
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def anthropic_client(running):
    return anthropic.AsyncAnthropic(base_url=running.url, api_key="none", max_retries=0)


@pytest.mark.parametrize("family", FAMILIES)
async def test_whole_calls(tokenizers, family):
    async with system(tokenizers[family], WRITTEN[family] % GIVEN) as running, openai_client(running) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == ("Let me see." if "Let" in WRITTEN[family] else None)
        calls = choice.message.tool_calls
        assert [(call.type, call.function.name) for call in calls] == [("function", "look"), ("function", "go")]
        assert [json.loads(call.function.arguments) for call in calls] == [SKY, {}]
        assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize("family", FAMILIES)
async def test_streamed_calls(tokenizers, family):
    async with system(tokenizers[family], WRITTEN[family] % GIVEN) as running, openai_client(running) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, stream=True)
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
        begun = [piece for piece in pieces if piece.id]
        assert [(piece.index, piece.type, piece.function.name) for piece in begun] == [
            (0, "function", "look"),
            (1, "function", "go"),
        ]
        assert [piece.index for piece in pieces] == sorted(piece.index for piece in pieces)
        assert all(piece.function.arguments == "" for piece in begun)
        assert all(piece.function.name is None and piece.type is None for piece in pieces if not piece.id)
        given = ["".join(piece.function.arguments for piece in pieces if piece.index == number) for number in (0, 1)]
        assert [json.loads(arguments) for arguments in given] == [SKY, {}]
        assert sum(piece.index == 0 for piece in pieces) > 3, "arguments come as they are written"
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert "".join(delta.content or "" for delta in deltas) == ("Let me see." if "Let" in WRITTEN[family] else "")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
async def test_calls_as_anthropic_has_them(tokenizers, family, streams):
    asked = {"model": MODEL, "messages": USER, "max_tokens": 300, "tools": ANTHROPIC_TOOLS}
    async with system(tokenizers[family], WRITTEN[family] % GIVEN) as running, anthropic_client(running) as client:
        if streams:
            async with client.messages.stream(**asked) as stream:
                message = await stream.get_final_message()
        else:
            message = await client.messages.create(**asked)
        assert message.stop_reason == "tool_use"
        *text, look, go = message.content
        assert [block.text for block in text] == (["Let me see."] if "Let" in WRITTEN[family] else [])
        assert (look.type, look.name, look.input) == ("tool_use", "look", SKY)
        assert (go.name, go.input) == ("go", {})
        assert look.id != go.id


@pytest.mark.parametrize("family", FAMILIES)
async def test_calls_and_results_reach_the_model(tokenizers, family):
    tokenizer = tokenizers[family]
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate((("look", GIVEN), ("go", "")))
    ]
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": "A bird."},
        {"role": "tool", "tool_call_id": "call_1", "content": "Done."},
    ]
    async with system(tokenizer, "A bird.") as running, openai_client(running) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("A bird.", "stop")
        read = tokenizer.decode(running.engine.submitted[0].prompt, skip_special_tokens=False)
    assert "Look at something." in read
    assert json.dumps(SKY, ensure_ascii=False) in read, "arguments are written as the object that they are"
    assert read.index('look"' if family != "mistral" else "look[") < read.index("A bird.") < read.index("Done.")
    if family == "llama":
        assert read.index("A bird.") < read.rindex('"name": "go"') < read.index("Done.")


async def test_tools_that_must_not_be_called_are_not_in_the_prompt(tokenizers):
    written = WRITTEN["hermes"] % GIVEN
    async with system(tokenizers["hermes"], written) as running, openai_client(running) as client:
        asked = {"model": MODEL, "messages": USER, "tools": TOOLS, "tool_choice": "none"}
        answer = await client.chat.completions.create(**asked)
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].message.content == written
        read = tokenizers["hermes"].decode(running.engine.submitted[0].prompt, skip_special_tokens=False)
    assert "Look at something." not in read


async def test_a_call_that_is_cut_off_is_not_lost(tokenizers):
    text = 'Well. <tool_call>\n{"name": "look", "arguments": {"at": "the sky and all'
    async with system(tokenizers["hermes"], text) as running, openai_client(running) as client:
        most = len(tokenizers["hermes"].encode(text, add_special_tokens=False))
        asked = {"model": MODEL, "messages": USER, "tools": TOOLS}
        answer = await client.chat.completions.create(**asked, max_tokens=most)
        (choice,) = answer.choices
        assert choice.finish_reason == "length"
        assert choice.message.content == "Well."
        assert choice.message.tool_calls[0].function.arguments == '{"at": "the sky and all'
        answer = await client.chat.completions.create(**asked, max_tokens=most - 13)
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].message.content.startswith("Well.<tool_call>\n{")
    async with system(tokenizers["hermes"], text) as running, anthropic_client(running) as client:
        message = await client.messages.create(model=MODEL, messages=USER, tools=ANTHROPIC_TOOLS, max_tokens=most)
        assert message.stop_reason == "max_tokens"
        assert [block.text for block in message.content] == ["Well.", 'look({"at": "the sky and all']


async def test_what_only_looks_like_a_call_is_text(tokenizers):
    for family, text in (
        ("hermes", '<tool_call>\n{"name": "delete", "arguments": {}}\n</tool_call>'),
        ("llama", '{"name": "Bob", "parameters": {}}'),
        ("llama", 'So {"name": "look", "parameters": {}}'),
        ("old_mistral", '[TOOL_CALLS] [{"name": "delete", "arguments": {}}]'),
    ):
        async with system(tokenizers[family], text) as running, openai_client(running) as client:
            answer = await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS)
            assert answer.choices[0].message.tool_calls is None
            assert answer.choices[0].message.content == text
            assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("streams", [False, True])
async def test_thoughts_come_apart(tokenizers, streams):
    text = "Is it a bird?\nIt is.\n</think>\n\nA bird."
    asked = {"model": MODEL, "messages": USER}
    async with system(tokenizers["thinking"], text) as running, openai_client(running) as client:
        if streams:
            stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
            content = "".join(delta.content or "" for delta in deltas)
            thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
            usage = chunks[-1].usage
        else:
            answer = await client.chat.completions.create(**asked)
            content, usage = answer.choices[0].message.content, answer.usage
            thought = answer.choices[0].message.reasoning_content
            assert answer.choices[0].message.reasoning == thought
        assert (content, thought) == ("A bird.", "Is it a bird?\nIt is.")
        counted = tokenizers["thinking"].encode(text.partition("\n\n")[0], add_special_tokens=False)
        assert usage.completion_tokens_details.reasoning_tokens == len(counted)
        hidden = await client.chat.completions.create(**asked, extra_body={"include_reasoning": False})
        assert hidden.choices[0].message.content == "A bird."
        assert not {"reasoning", "reasoning_content"} & set(hidden.choices[0].message.model_dump())
    async with system(tokenizers["thinking"], text) as running, anthropic_client(running) as client:
        asked |= {"max_tokens": 100}
        plain = await client.messages.create(**asked)
        assert [block.type for block in plain.content] == ["text"]
        asked |= {"thinking": {"type": "enabled", "budget_tokens": 1024}}
        if streams:
            async with client.messages.stream(**asked) as stream:
                message = await stream.get_final_message()
        else:
            message = await client.messages.create(**asked)
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert (message.content[0].thinking, message.content[1].text) == ("Is it a bird?\nIt is.", "A bird.")


async def test_calls_after_a_thought(tokenizers):
    text = 'Hm. <tool_call> is how. </think>\n\n<tool_call>\n{"name": "go"}\n</tool_call>'
    async with system(tokenizers["thinking"], text) as running, openai_client(running) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS)
        message = answer.choices[0].message
        assert message.reasoning_content == "Hm. <tool_call> is how."
        assert (message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("go", "{}")]


async def test_tokens_are_counted_with_tools(tokenizers):
    asked = {"model": MODEL, "messages": USER}
    async with system(tokenizers["hermes"], "Yes.") as running, anthropic_client(running) as client:
        plain = await client.messages.count_tokens(**asked)
        with_tools = await client.messages.count_tokens(**asked, tools=ANTHROPIC_TOOLS)
        message = await client.messages.create(**asked, tools=ANTHROPIC_TOOLS, max_tokens=5)
        assert plain.input_tokens < with_tools.input_tokens == message.usage.input_tokens
        tokenised = await running.client.post("/tokenize", json={**asked, "tools": [*map(as_tool, ANTHROPIC_TOOLS)]})
        assert tokenised.json()["count"] == with_tools.input_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_faults_of_tools_are_reported(tokenizers, fields, param):
    async with system(tokenizers["hermes"], "Yes.") as running:
        answer = await running.client.post("/v1/chat/completions", json={"model": MODEL, "messages": USER, **fields})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert not running.engine.submitted


@pytest.mark.parametrize("streams", [False, True])
async def test_functions_are_called_in_the_older_words(tokenizers, streams):
    written = '<tool_call>\n{"name": "look", "arguments": ' + GIVEN + "}\n</tool_call>"
    messages = [
        *USER,
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}},
        {"role": "function", "name": "look", "content": "A bird."},
    ]
    asked = {"model": MODEL, "messages": messages, "functions": [LOOK, GO], "function_call": {"name": "look"}}
    async with system(tokenizers["hermes"], written) as running, openai_client(running) as client:
        if streams:
            stream = await client.chat.completions.create(**asked, stream=True)
            chunks = [chunk.choices[0] async for chunk in stream]
            pieces = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
            name, given = pieces[0].name, "".join(piece.arguments or "" for piece in pieces)
            finish = chunks[-1].finish_reason
        else:
            (choice,) = (await client.chat.completions.create(**asked)).choices
            assert (choice.message.content, choice.message.tool_calls) == (None, None)
            called, finish = choice.message.function_call, choice.finish_reason
            name, given = called.name, called.arguments
        assert finish == "function_call"
        assert {"name": name, "arguments": given} == {"name": "look", "arguments": GIVEN}
        read = tokenizers["hermes"].decode(running.engine.submitted[0].prompt, skip_special_tokens=False)
    assert '{"name": "look", "arguments": {}}' in read
    assert "<tool_response>\nA bird." in read


async def test_a_call_goes_on_at_another_replica(tokenizers):
    tokenizer = tokenizers["thinking"]
    text = "Let me see.</think>" + WRITTEN["hermes"] % GIVEN
    tokens = [*tokenizer.encode(text, add_special_tokens=False), END]
    card = replace(CARD, vocab_size=tokenizer.vocab_size, eos_token_ids=(END,), context_tokens=4096)
    within = text.index("sky")
    breaks = ScriptedAnswer(
        tokens=tokens,
        fault=AnswerFault.DROP,
        fault_after=len(tokenizer.encode(text[:within], add_special_tokens=False)),
    )
    answers = [breaks, ScriptedAnswer(tokens=tokens)]
    async with (
        gateway(answers, tokenizer=tokenizer, card=card, recoveries=1) as running,
        openai_client(running) as client,
    ):
        asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS))
        await running.wait_until(lambda: running.engine.submitted and not running.link.is_ready)
        await running.link.connect(timeout_s=300)
        (choice,) = (await asking).choices
        await running.wait_until(lambda: running.contexts)
        assert running.contexts[0].recoveries == 1
        assert choice.message.reasoning_content == "Let me see."
        assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [SKY, {}]
        assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("streams", [False, True])
async def test_old_results_are_cleared_from_the_prompt_and_that_is_told(tokenizers, streams):
    def messages(result):
        call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sea"}}
        results = [{"type": "tool_result", "tool_use_id": "t1", "content": result}]
        return [*USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": results}]

    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 30},
        "keep": {"type": "tool_uses", "value": 0},
    }
    asked = {
        "model": MODEL,
        "max_tokens": 9,
        "messages": messages("Waves. " * 9),
        "context_management": {"edits": [edit]},
    }
    async with system(tokenizers["hermes"], "Hi.") as running, anthropic_client(running) as client:
        full = await client.messages.count_tokens(model=MODEL, messages=asked["messages"])
        cleared = await client.messages.count_tokens(model=MODEL, messages=messages(CLEARED))
        if streams:
            async with client.beta.messages.stream(**asked) as events:
                message = await events.get_final_message()
        else:
            message = await client.beta.messages.create(**asked)
        (applied,) = message.context_management.applied_edits
        assert applied.cleared_tool_uses == 1
        assert applied.cleared_input_tokens == full.input_tokens - cleared.input_tokens > 0
        await running.wait_until(lambda: running.contexts[-1].prompt_tokens)
        assert running.contexts[-1].prompt_tokens == cleared.input_tokens
        edit["trigger"]["value"] = full.input_tokens
        kept = await client.beta.messages.create(**asked)
        assert kept.context_management.applied_edits == []
        del asked["max_tokens"]
        counted = await client.beta.messages.count_tokens(**asked)
        assert counted.input_tokens == counted.context_management.original_input_tokens == full.input_tokens
