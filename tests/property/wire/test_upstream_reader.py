"""Events that come in one read are taken together. Whatever they are, that must come to the same as one by one."""

import json

from hypothesis import given
from hypothesis import strategies as st

from maitred.api.streaming import CollectedChoice
from maitred.core.errors import MaitredError
from maitred.replica.upstream.dialects import DIALECTS
from maitred.replica.upstream.errors import failure_details
from maitred.replica.upstream.openai_stream import OpenAIStreamParser
from maitred.wire.openai.written import merge_deltas


def chunk(delta, finish=None, index=0, usage=None, **more):
    choice = {"index": index, "delta": delta, "finish_reason": finish, **more}
    return json.dumps({"choices": [choice], "usage": usage}).encode()


def said(delta, fingerprint, padding):
    """A chunk with members around it, as OpenAI writes them."""
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    fields = {"id": "x", "choices": [choice], "system_fingerprint": fingerprint, "obfuscation": padding}
    return json.dumps(fields, separators=(",", ":")).encode()


def numbered(number, text, details):
    """A chunk with an id and a usage of its own."""
    usage = None if details is None else {**counted(number), "completion_tokens_details": details or None}
    fields = {"id": str(number), "created": number, "choices": [{"index": 0, "delta": {"content": text}}]}
    return json.dumps({**fields, "usage": usage}).encode()


def counted(tokens):
    return {"prompt_tokens": 5, "completion_tokens": tokens}


LOGPROBS = {"content": [{"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}]}
TEXTS = st.text(st.sampled_from('aé{}"\n \\'), max_size=3).map(lambda text: chunk({"content": text}))
EVENTS = st.one_of(
    TEXTS,
    TEXTS,
    st.integers(0, 9).map(lambda tokens: chunk({"content": "b"}, usage=counted(tokens))),
    st.builds(
        said,
        st.sampled_from([{"content": "h"}, {"content": ',"obfuscation":"'}, {"reasoning_content": "i"}]),
        st.sampled_from(["fp", None]),
        st.text("xyz", max_size=3),
    ),
    st.builds(
        numbered, st.integers(0, 9), st.sampled_from(["", "j"]), st.sampled_from([None, {}, {"reasoning_tokens": 1}])
    ),
    st.integers(0, 2).map(lambda index: chunk({"content": "c"}, index=index)),
    st.sampled_from(["stop", "length", "abort"]).map(lambda finish: chunk({}, finish)),
    st.integers(0, 9).map(lambda tokens: json.dumps({"choices": [], "usage": counted(tokens)}).encode()),
    st.sampled_from(
        [
            chunk({"role": "assistant", "content": ""}),
            chunk({"content": "d"}, "stop"),
            chunk({"content": "a"}, logprobs=LOGPROBS),
            chunk({"reasoning_content": "why"}),
            chunk({"reasoning_content": " not"}),
            chunk({"reasoning_content": " never", "reasoning": "so"}),
            chunk({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}]}),
            chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}),
            chunk({"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}),
            chunk({"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}]}),
            chunk({"annotations": [{"url": "u"}]}),
            b"ping",
            b"",
            chunk({"content": 3}),
            chunk({"content": [{"type": "text", "text": "e"}]}),
            b'{"choices": [{"index": 0, "delta": {"content": "f\\ud83d"}}]}',
            b'{"choices": [{"index": 0, "delta": {"content": "\\ude00"}}]}',
            b"[DONE]",
            b"null",
            b"{}",
            b"{}{}",
            b"}",
            b'{"choices": [',
            b']}{"choices": []}',
            b' {"choices": []}',
            b'{"choices": []} ',
            b'{"error": {"message": "no", "code": 400}}',
            b'{"choices": [{"index": 0, "delta": {"content": "\xff"}}]}',
            b"<html>",
        ]
    ),
)


def read(pieces, choices, dialect):
    """What is known after each way to have come to its end."""
    reader = OpenAIStreamParser("there", choices, DIALECTS[dialect])
    texts, others, usage, chunks = [""] * choices, [], None, 0
    extras, metadata = [[] for _ in texts], [[] for _ in texts]
    try:
        for piece in pieces:
            batch = reader.feed(piece)
            if batch is not None:
                usage = batch.usage or usage
                chunks += batch.chunks
                for part in batch.parts:
                    texts[part.index] += part.text
                    if part.extra is not None:
                        extras[part.index].append(part.extra)
                    if part.metadata is not None:
                        metadata[part.index].append((len(texts[part.index]), part.metadata))
                    if part.finish is not None or part.scores is not None:
                        others.append((len(texts[part.index]), part.finish, part.scores))
        reader.on_end(is_framed=False)
    except MaitredError as failure:
        return type(failure), failure_details(failure), str(failure), reader.has_begun
    merged = [merge_deltas(of_choice) for of_choice in extras]
    for message in merged:
        for call in message.get("tool_calls", ()):
            call["id"] = call["id"][:5]  # those that are made here are new each time
    return texts, others, merged, metadata, usage, chunks, reader.has_begun, reader.is_complete


@given(st.lists(EVENTS, max_size=8), st.booleans(), st.integers(1, 2), st.sampled_from(["vllm", "generic", "ollama"]))
def test_events_together_are_read_as_events_one_by_one(events, ends, choices, dialect):
    if ends:
        events = [*events, chunk({}, "stop"), json.dumps({"choices": [], "usage": counted(20)}).encode(), b"[DONE]"]
    pieces = [b"data: " + event + b"\n\n" for event in events]
    assert read([b"".join(pieces)], choices, dialect) == read(pieces, choices, dialect)


MEMBERS = st.sampled_from(["content", "reasoning_content", "refusal"])
PIECES = st.lists(st.tuples(MEMBERS, st.sampled_from(["a", "b", '"é'])), min_size=1, max_size=2).map(dict)


@given(st.lists(st.tuples(PIECES, st.booleans()), max_size=8), st.booleans())
def test_every_text_stays_a_text_of_its_member(chunks, at_once):
    """Whatever came before it, and whatever its chunk has beside it."""
    events = [chunk(pieces, usage=counted(9) if has_usage else None) for pieces, has_usage in chunks]
    data = [b"data: " + event + b"\n\n" for event in events]
    reader = OpenAIStreamParser("there", 1, DIALECTS["generic"])
    read = {"content": "", "reasoning_content": "", "refusal": ""}
    for piece in [b"".join(data)] if at_once else data:
        batch = reader.feed(piece)
        for part in () if batch is None else batch.parts:
            read["content"] += part.text
            for member, text in (part.extra or {}).items():
                read[member] += text
    assert read == {member: "".join(pieces.get(member, "") for pieces, _ in chunks) for member in read}


PIECES_OF_CALLS = st.lists(st.tuples(st.booleans(), st.sampled_from(["[1]", "[2, ", "]"]), st.booleans()), max_size=8)


@given(PIECES_OF_CALLS, st.booleans())
def test_arguments_stay_those_of_their_call(pieces, at_once):
    """Without an index, the call of a piece is the one that was begun last, whatever else its chunk has."""
    calls, data = [], []
    for begins, text, has_usage in [(True, "[", False), *pieces]:
        piece = {"function": {"arguments": text}}
        if begins:
            piece = {"id": f"call-{len(calls)}", "function": {"name": "f", "arguments": text}}
            calls.append("")
        calls[-1] += text
        event = chunk({"tool_calls": [piece]}, usage=counted(9) if has_usage else None)
        data.append(b"data: " + event + b"\n\n")
    reader = OpenAIStreamParser("there", 1, DIALECTS["generic"])
    written = dict.fromkeys(range(len(calls)), "")
    for piece in [b"".join(data)] if at_once else data:
        batch = reader.feed(piece)
        for part in () if batch is None else batch.parts:
            for call in part.extra["tool_calls"]:
                written[call["index"]] += call["function"]["arguments"]
    assert [*written.values()] == calls


TOKENS = st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(1, 2)), max_size=8)


@given(TOKENS, st.booleans())
def test_every_token_id_is_told_once(tokens, at_once):
    """Also those of tokens that have no text yet, and of equal tokens."""
    data = [b"data: " + chunk({"content": text}, token_ids=[token]) + b"\n\n" for text, token in tokens]
    data.append(b"data: " + chunk({}, "stop") + b"\n\n")
    reader = OpenAIStreamParser("there", 1, DIALECTS["vllm"])
    whole = CollectedChoice()
    for piece in [b"".join(data)] if at_once else data:
        batch = reader.feed(piece)
        for part in () if batch is None else batch.parts:
            whole.add(part)
    assert "".join(whole.text) == "".join(text for text, _ in tokens)
    assert whole.whole_metadata().choice.get("token_ids", []) == [token for _, token in tokens]


def test_text_that_comes_at_once_is_one_part():
    reader = OpenAIStreamParser("there", 1, DIALECTS["vllm"])
    batch = reader.feed(b"".join(b"data: " + chunk({"content": text}) + b"\n\n" for text in "abc"))
    assert [part.text for part in batch.parts] == ["abc"]
    assert batch.chunks == 3
