"""A stream and a whole answer say the same in every API: what was said, by choice and member."""

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from maitred.api.chat import ChatFormatter
from maitred.api.completions import CompletionFormatter
from maitred.api.messages import MessagesFormatter
from maitred.api.streaming import CollectedChoice
from maitred.core.context import RequestContext
from maitred.core.inference import ChunkMetadata, TextDelta
from maitred.core.request import FinishReason, Usage
from maitred.wire.openai.decode import decode_chat, decode_completion
from maitred.wire.sse import SSEDecoder

CHOICES = 2
USAGE = Usage(5, 9)
PIECES = st.sampled_from(["a", "b ", '"é', "\n", "{}"])
THOUGHTS = st.sampled_from([["reasoning_content"], ["reasoning"], ["reasoning_content", "reasoning"]])
METADATA = st.builds(
    ChunkMetadata,
    st.sampled_from([{}, {"system_fingerprint": "f"}, {"system_fingerprint": "g"}]),
    st.sampled_from([{}, {"filtered": {"hate": False}}]),
)
DELTAS = st.one_of(
    st.builds(TextDelta, st.integers(0, 1), PIECES),
    st.builds(TextDelta, st.integers(0, 1), PIECES, metadata=METADATA),
    st.builds(TextDelta, st.integers(0, 1), PIECES | st.just(""), extra=st.builds(dict.fromkeys, THOUGHTS, PIECES)),
    st.builds(TextDelta, st.integers(0, 1), st.just(""), extra=st.builds(dict, refusal=PIECES)),
    st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(1, 3)),
)


def deltas_of(drawn):
    """Deltas, of which those of calls number and name them, and give each a list of numbers as its argument."""
    counts = [{}, {}]
    parts = []
    for part in drawn:
        if isinstance(part, TextDelta):
            parts.append(part)
            continue
        index, asked, numbers = part
        number = min(asked, len(counts[index]))
        call = {"index": number, "function": {"arguments": ", 1" * numbers}}
        if number not in counts[index]:
            call |= {"id": f"call-{number}", "type": "function"}
            call["function"] = {"name": f"f{number}", "arguments": '{"a": [0' + ", 1" * numbers}
            counts[index][number] = 1
        counts[index][number] += numbers
        parts.append(TextDelta(index, "", extra={"tool_calls": [call]}))
    for index, numbers in enumerate(counts):
        ends = [{"index": number, "function": {"arguments": "]}"}} for number in numbers]
        parts += [TextDelta(index, "", extra={"tool_calls": ends})] if ends else []
        parts.append(TextDelta(index, "", FinishReason.TOOL_CALLS if ends else FinishReason.STOP))
    calls = [
        [(f"f{number}", {"a": [0] + [1] * (numbers[number] - 1)}) for number in sorted(numbers)] for numbers in counts
    ]
    return parts, calls


def said(parts, index, member):
    if member == "content":
        return "".join(part.text for part in parts if part.index == index)
    return "".join((part.extra or {}).get(member, "") for part in parts if part.index == index)


def context():
    return RequestContext("req-1", 0.0, model="m")


def events(form, parts):
    sent = form.start() + form.events(parts) + form.end(USAGE)
    return [msgspec.json.decode(event.data) for event in SSEDecoder().feed(sent)]


def collected(parts):
    choices = [CollectedChoice() for _ in range(CHOICES)]
    for part in parts:
        choices[part.index].add(part)
    return choices


def chat_form(**more):
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": CHOICES, **more}
    return ChatFormatter(decode_chat(msgspec.json.encode(asked), strict=True), "chatcmpl-1", context())


def told_in_chats(messages):
    """What the messages of one choice say: those of chunks are pieces."""
    texts = dict.fromkeys(("content", "reasoning_content", "reasoning", "refusal"), "")
    calls = {}
    for message in messages:
        for member in texts:
            texts[member] += message.get(member) or ""
        pieces = [
            (call.get("index", place), call["function"]) for place, call in enumerate(message.get("tool_calls", ()))
        ]
        for number, piece in pieces:
            call = calls.setdefault(number, ["", ""])
            call[0] += piece.get("name", "")
            call[1] += piece["arguments"]
    return texts, [(name, json.loads(given)) for _, (name, given) in sorted(calls.items())]


@given(st.lists(DELTAS, max_size=8), st.booleans())
def test_chats(drawn, has_usage):
    parts, calls = deltas_of(drawn)
    whole = msgspec.json.decode(chat_form().whole(collected(parts), USAGE))["choices"]
    chunks = events(chat_form(stream=True, stream_options={"include_usage": has_usage}), parts)
    for index in range(CHOICES):
        streamed = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        members = "content", "reasoning_content", "reasoning", "refusal"
        expected = {member: said(parts, index, member) for member in members}, calls[index]
        assert told_in_chats(choice["delta"] for choice in streamed) == expected
        assert told_in_chats([whole[index]["message"]]) == expected
        finishes = [choice["finish_reason"] for choice in streamed if choice["finish_reason"] is not None]
        assert finishes == [whole[index]["finish_reason"]] == ["tool_calls" if calls[index] else "stop"]


@given(st.lists(DELTAS, max_size=8))
def test_functions_of_the_old_api(drawn):
    """A message has one call of a function; others stay beside it as calls of tools."""
    parts, calls = deltas_of(drawn)
    asked = {"functions": [{"name": "f0"}]}
    whole = msgspec.json.decode(chat_form(**asked).whole(collected(parts), USAGE))["choices"]
    chunks = events(chat_form(**asked, stream=True), parts)
    for index in range(CHOICES):
        pieces = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        for messages in (pieces, [whole[index]["message"]]):
            functions = [message["function_call"] for message in messages if "function_call" in message]
            first = "".join(function["arguments"] for function in functions)
            named = "".join(function.get("name", "") for function in functions)
            others = told_in_chats(messages)[1]
            assert ([(named, json.loads(first))] if functions else []) + others == calls[index]


@given(st.lists(DELTAS, max_size=8))
def test_completions(drawn):
    parts, _ = deltas_of(drawn)
    asked = {"model": "m", "prompt": "hi", "n": CHOICES}
    whole, streamed = (
        CompletionFormatter(
            decode_completion(msgspec.json.encode({**asked, "stream": streams}), strict=True), "cmpl-1", context()
        )
        for streams in (False, True)
    )
    answer = msgspec.json.decode(whole.whole(collected(parts), USAGE))["choices"]
    chunks = [choice for chunk in events(streamed, parts) for choice in chunk["choices"]]
    for index in range(CHOICES):
        told = [choice for choice in chunks if choice["index"] == index]
        assert "".join(choice["text"] for choice in told) == answer[index]["text"] == said(parts, index, "content")
        for member in ("reasoning_content", "refusal"):
            expected = said(parts, index, member)
            assert "".join(choice.get(member, "") for choice in told) == answer[index].get(member, "") == expected


@given(st.lists(DELTAS, max_size=8))
def test_messages(drawn):
    parts, calls = deltas_of(drawn)
    parts = [part for part in parts if part.index == 0]
    extras = [part.extra or {} for part in parts]
    thoughts = [extra.get("reasoning_content", extra.get("reasoning", "")) for extra in extras]
    text = said(parts, 0, "content") + said(parts, 0, "refusal")
    texts = [part.text + extra.get("refusal", "") for part, extra in zip(parts, extras, strict=True)]
    form = MessagesFormatter("msg_1", context(), thoughts=True)
    blocks = msgspec.json.decode(form.whole(collected(parts)[:1], USAGE))["content"]
    assert "".join(block.get("text", "") for block in blocks) == text
    assert "".join(block.get("thinking", "") for block in blocks) == "".join(thoughts)
    assert [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"] == calls[0]
    blocks, written = [], {}
    for event in events(MessagesFormatter("msg_1", context(), thoughts=True), parts):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            member = next(name for name in ("text", "thinking", "partial_json") if name in delta)
            written.setdefault(member, {}).setdefault(event["index"], []).append(delta[member])
    told = {member: ["".join(pieces) for pieces in of_blocks.values()] for member, of_blocks in written.items()}
    assert "".join(told.get("text", ())) == "".join(texts)
    assert "".join(told.get("thinking", ())) == "".join(thoughts)
    names = [block["name"] for block in blocks if block["type"] == "tool_use"]
    assert list(zip(names, map(json.loads, told.get("partial_json", ())), strict=True)) == calls[0]
