"""Requests as agents write them are answered with what they read: Codex, Claude Code, Agents SDK, Vercel, opencode.

The shapes in tests/data/agent_requests have the members, item kinds and headers of what `codex-cli` 0.171 and
`claude` 2.1.197 sent to a server that wrote it down, and of what the documentation of the others shows. Their texts
are ours.
"""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from maitred.core.context import Outcome
from tests.conformance.test_responses import END, serving
from tests.support.gateway import CARD, MODEL
from tests.support.tool_models import save_tool_tokenizer

FOLDER = Path(__file__).parent.parent / "data" / "agent_requests"
SHAPES = sorted(path.stem for path in FOLDER.glob("*.json"))
CALL = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'
TEXT = "A fox is red."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tool_tokenizer(tmp_path_factory.mktemp("hermes"), "hermes")


def events_of(answer):
    """The events of a stream, each named as its data says."""
    events = []
    for block in answer.text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines.get("data") not in (None, "[DONE]"):
            data = json.loads(lines["data"])
            assert lines["event"] == data["type"]
            events.append(data)
    return events


def items_of_response(answer, streams):
    """Kind and content of each item of an answer of the Responses API."""
    response = events_of(answer)[-1]["response"] if streams else answer.json()
    assert response["status"] == "completed"
    return [
        (item["type"], item["name"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in response["output"]
    ]


def items_of_message(answer, streams):
    """Kind and content of each block of an answer of the Messages API, in the kinds of items."""
    if streams:
        blocks = {}
        for event in events_of(answer):
            if event["type"] == "content_block_start":
                blocks[event["index"]] = event["content_block"]
            elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
                blocks[event["index"]]["text"] += event["delta"]["text"]
        content = list(blocks.values())
    else:
        content = answer.json()["content"]
    return [
        ("message", block["text"]) if block["type"] == "text" else ("function_call", block["name"]) for block in content
    ]


@pytest.mark.parametrize("name", SHAPES)
async def test_it_is_answered(tmp_path, tokenizer, name):
    shape = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    called = shape.get("calls")
    written = CALL % called if called else shape.get("text", TEXT)
    card = replace(CARD, vocab_size=tokenizer.vocab_size, eos_token_ids=(END,), context_tokens=1 << 16)
    async with serving(tmp_path, [written], tokenizer, card=card) as (system, _):
        body = {**shape["body"], "model": MODEL}
        answer = await system.client.post(shape["path"], json=body, headers=shape.get("headers", {}))
        assert answer.status_code == 200, answer.text
        if shape.get("counts"):
            assert answer.json()["input_tokens"] > 0
            return
        ignored = answer.headers.get("x-maitred-ignored", "")
        assert [field for field in ignored.split(", ") if field.startswith("tools")] == shape.get("ignored", [])
        read = items_of_message if "messages" in shape["path"] else items_of_response
        expected = [("function_call", called)] if called else [("message", written)]
        assert read(answer, body.get("stream", False)) == expected
        await system.wait_until(lambda: system.contexts)
        assert [context.outcome for context in system.contexts] == [Outcome.FINISHED]
