"""Edits of the context: what they remove, and when."""

import json

import pytest

from maitred.wire.anthropic.context_edits import CLEARED, apply_edits
from maitred.wire.anthropic.decode import decode_messages

TOOL_USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"


def conversation(turns):
    """Turns of a question, a thought with a call, and its result."""
    messages = [{"role": "user", "content": "Look."}]
    for number in range(turns):
        thought = {"type": "thinking", "thinking": f"Thought {number}", "signature": "s"}
        name = "look" if number % 2 == 0 else "write"
        call = {"type": "tool_use", "id": f"t{number}", "name": name, "input": {"at": number}}
        messages.append({"role": "assistant", "content": [thought, call]})
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": f"Result {number}"}
        messages.append({"role": "user", "content": [result]})
    return messages


async def edited(*edits, turns=5, tokens_per_byte=1):
    """What is left of the results, the inputs and the thoughts, and what is told of the edits."""
    body = {"model": "m", "max_tokens": 9, "messages": conversation(turns), "context_management": {"edits": edits}}
    request = decode_messages(json.dumps(body).encode(), strict=True)

    async def count(shorter):
        return sum(len(str(message)) for message in shorter.messages) * tokens_per_byte

    shorter, applied = await apply_edits(request, count)
    before, after = await count(request), await count(shorter)
    assert sum(edit["cleared_input_tokens"] for edit in applied) == before - after
    blocks = [block for message in shorter.messages[1:] for block in message.blocks()]
    return (
        [block.content for block in blocks if hasattr(block, "tool_use_id")],
        [block.input for block in blocks if hasattr(block, "input")],
        [block.thinking for block in blocks if hasattr(block, "thinking")],
        [{name: edit[name] for name in edit if name != "cleared_input_tokens"} for edit in applied],
    )


def results(turns, kept):
    return [f"Result {number}" if number in kept else CLEARED for number in range(turns)]


async def test_the_results_of_the_oldest_calls_are_cleared_and_their_inputs_where_asked():
    trigger = {"type": "tool_uses", "value": 4}
    left, inputs, thoughts, applied = await edited({"type": TOOL_USES, "trigger": trigger})
    assert left == results(5, {2, 3, 4})
    assert inputs == [{"at": number} for number in range(5)]
    assert len(thoughts) == 5
    assert applied == [{"type": TOOL_USES, "cleared_tool_uses": 2}]
    keep = {"type": "tool_uses", "value": 1}
    left, inputs, _, applied = await edited(
        {"type": TOOL_USES, "trigger": trigger, "keep": keep, "clear_tool_inputs": ["write"], "exclude_tools": None}
    )
    assert left == results(5, {4})
    assert inputs == [{"at": 0}, {}, {"at": 2}, {}, {"at": 4}]
    assert applied == [{"type": TOOL_USES, "cleared_tool_uses": 4}]
    left, *_, applied = await edited(
        {"type": TOOL_USES, "trigger": trigger, "keep": keep, "exclude_tools": ["look"]}, turns=7
    )
    assert left == results(7, {0, 2, 4, 5, 6})
    assert applied == [{"type": TOOL_USES, "cleared_tool_uses": 2}]


@pytest.mark.parametrize(
    "edit",
    [
        {"type": TOOL_USES},
        {"type": TOOL_USES, "trigger": {"type": "tool_uses", "value": 5}},
        {"type": TOOL_USES, "trigger": {"type": "input_tokens", "value": 1}, "keep": {"type": "tool_uses", "value": 5}},
        {
            "type": TOOL_USES,
            "trigger": {"type": "input_tokens", "value": 1},
            "clear_at_least": {"type": "input_tokens", "value": 100_000},
        },
        {"type": THINKING, "keep": "all"},
        {"type": THINKING, "keep": {"type": "thinking_turns", "value": 5}},
    ],
)
async def test_nothing_is_cleared_before_it_is_due(edit):
    left, inputs, thoughts, applied = await edited(edit)
    assert (left, len(inputs), len(thoughts), applied) == (results(5, range(5)), 5, 5, [])


async def test_a_prompt_is_as_long_as_its_model_counts_it():
    edit = {"type": TOOL_USES}
    assert (await edited(edit, tokens_per_byte=1))[3] == []
    assert (await edited(edit, tokens_per_byte=1_000))[3] == [{"type": TOOL_USES, "cleared_tool_uses": 2}]


async def test_thoughts_of_all_but_the_latest_turns_are_cleared():
    assert (await edited({"type": THINKING}))[2:] == (
        ["Thought 4"],
        [{"type": THINKING, "cleared_thinking_turns": 4}],
    )
    keep = {"type": "thinking_turns", "value": 2}
    both = await edited(
        {"type": THINKING, "keep": keep}, {"type": TOOL_USES, "trigger": {"type": "tool_uses", "value": 1}}
    )
    assert both[0] == results(5, {2, 3, 4})
    assert both[2] == ["Thought 3", "Thought 4"]
    assert [edit["type"] for edit in both[3]] == [THINKING, TOOL_USES]


async def test_cleared_once_a_result_is_not_cleared_again():
    body = {"model": "m", "max_tokens": 9, "messages": conversation(5)}
    body["messages"][2]["content"][0]["content"] = CLEARED
    body["context_management"] = {"edits": [{"type": TOOL_USES, "trigger": {"type": "tool_uses", "value": 0}}]}
    request = decode_messages(json.dumps(body).encode(), strict=True)

    async def count(_):
        return 1

    assert (await apply_edits(request, count))[1] == [
        {"type": TOOL_USES, "cleared_tool_uses": 1, "cleared_input_tokens": 0}
    ]
