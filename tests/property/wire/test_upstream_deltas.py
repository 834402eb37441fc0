"""Whatever a server puts into its deltas: what its reader lets through, every API can write."""

import json
from contextlib import suppress
from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from maitred.api.chat import ChatFormatter
from maitred.api.completions import CompletionFormatter
from maitred.api.messages import MessagesFormatter
from maitred.api.streaming import CollectedChoice
from maitred.core.context import RequestContext
from maitred.core.errors import MaitredError
from maitred.core.request import Usage
from maitred.replica.upstream.dialects import DIALECTS
from maitred.replica.upstream.openai_stream import OpenAIStreamParser
from maitred.wire.openai.decode import decode_chat, decode_completion
from maitred.wire.sse import DONE, encode_event

ODD = st.sampled_from([None, "", "a", '{"b": 1}', 0, 1, -1, 2.5, True, [], {}, ["a"], {"name": "f"}])
FUNCTIONS = st.fixed_dictionaries({}, optional={"name": ODD, "arguments": ODD, "more": ODD})
CALLS = st.fixed_dictionaries(
    {},
    optional={
        "index": ODD,
        "id": ODD,
        "type": ODD | st.just("custom"),
        "function": FUNCTIONS | ODD,
        "custom": st.fixed_dictionaries({}, optional={"name": ODD, "input": ODD}) | ODD,
        "extra_content": ODD,
    },
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "image_url", "reference", "refusal"]) | ODD},
    optional={"text": ODD, "thinking": ODD, "refusal": ODD, "image_url": ODD, "annotations": ODD},
)
CONTENTS = st.lists(PARTS | ODD, max_size=2) | PARTS | ODD
SCORES = st.fixed_dictionaries(
    {"token": st.just("a") | ODD, "logprob": st.just(-1.0) | ODD},
    optional={"bytes": ODD | st.lists(st.sampled_from([0, 255, 256, -1, "a"]), max_size=2), "top_logprobs": ODD},
)
CHOICES = st.fixed_dictionaries(
    {
        "delta": st.fixed_dictionaries(
            {},
            optional={
                "role": ODD,
                "content": CONTENTS,
                "tool_calls": st.lists(CALLS | ODD, max_size=2) | ODD,
                "function_call": FUNCTIONS | ODD,
                "refusal": CONTENTS,
                "reasoning_content": CONTENTS,
                "audio": st.fixed_dictionaries({}, optional={"id": ODD, "data": ODD}) | ODD,
                "images": st.lists(PARTS, max_size=2) | ODD,
                "reasoning_details": st.lists(st.fixed_dictionaries({}, optional={"index": ODD, "text": ODD})) | ODD,
            },
        )
    },
    optional={
        "index": st.just(0) | ODD,
        "text": ODD,
        "message": ODD,
        "finish_reason": ODD,
        "logprobs": ODD
        | st.fixed_dictionaries({"content": st.lists(SCORES)}, optional={"refusal": st.lists(SCORES) | ODD}),
        "stop_reason": ODD,
        "content_filter_results": ODD,
        "usage": ODD,
    },
)
CHUNKS = st.fixed_dictionaries(
    {"choices": st.lists(CHOICES, max_size=1)},
    optional={"system_fingerprint": ODD, "citations": ODD, "error": ODD, "object": ODD, "maitred": ODD, "usage": ODD},
)
END = {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}
COUNTS = st.sampled_from([0, 1, 2, 7, 9])
USAGES = st.none() | st.fixed_dictionaries(
    {"prompt_tokens": COUNTS, "completion_tokens": COUNTS},
    optional={
        "total_tokens": COUNTS,
        "prompt_tokens_details": st.sampled_from([None, {}, {"cached_tokens": 1}, {"cached_tokens": None}]),
        "completion_tokens_details": st.sampled_from([None, {"reasoning_tokens": 1}, {"more": 1}]),
        "more": ODD,
    },
)
USUAL_CHOICES = st.fixed_dictionaries(
    {
        "delta": st.fixed_dictionaries(
            {},
            optional={
                "role": st.sampled_from([None, "assistant"]),
                "content": st.sampled_from([None, "", "a", "b", '"\\é\n', "content"]),
                "tool_calls": st.sampled_from([None, [{"index": 0, "id": "c", "function": {"name": "f"}}]]),
                "refusal": st.none() | ODD,
                "reasoning_content": st.sampled_from([None, None, "r"]),
            },
        )
    },
    optional={
        "index": st.sampled_from([None, 0, 1]),
        "finish_reason": st.sampled_from([None, "", "stop", "length", "tool_calls", "error"]),
        "logprobs": st.none(),
        "stop_reason": st.sampled_from([None, "a"]),
        "text": ODD,
    },
)
USUAL_CHUNKS = st.fixed_dictionaries(
    {"choices": st.lists(USUAL_CHOICES, max_size=1)},
    optional={"id": ODD, "usage": USAGES, "system_fingerprint": st.sampled_from([None, None, "f"])},
)


def shapes():
    for more in ({}, {"functions": [{"name": "f"}]}, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
        asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
        yield ChatFormatter(
            decode_chat(msgspec.json.encode(asked), strict=True), "chatcmpl-1", RequestContext("req-1", 0.0)
        )
    asked = {"model": "m", "prompt": "hi", "stream_options": {"include_usage": True}, "stream": True}
    completion = decode_completion(msgspec.json.encode(asked), strict=True)
    yield CompletionFormatter(completion, "cmpl-1", RequestContext("req-1", 0.0))
    yield MessagesFormatter("msg_1", RequestContext("req-1", 0.0), thoughts=True)


@given(st.lists(CHUNKS, max_size=4))
def test_what_is_let_through_can_be_written(events):
    reader = OpenAIStreamParser("there", 1, DIALECTS["generic"])
    whole = CollectedChoice()
    streamed = [*shapes()]
    with suppress(MaitredError):  # it is broken, and the error says so
        for event in [*events, END]:
            batch = reader.feed(encode_event(json.dumps(event).encode()))
            for part in () if batch is None else batch.parts:
                whole.add(part)
                for shape in streamed:
                    shape.events([part])
        for shape in streamed:
            shape.end(Usage(1, 1, details={"cost": 1}))
    for shape in shapes():
        shape.whole([whole], Usage(1, 1))
        shape.whole([whole], Usage(1, 1, details={"prompt_tokens_details": "odd", "cost": 1}))


def read(chunks, choices, cuts, **further):
    """Batches of a stream whose chunks have these further members, and how it ended."""
    reader = OpenAIStreamParser("there", choices, DIALECTS["generic"])
    events = [encode_event(json.dumps({**chunk, **further}, separators=(",", ":")).encode()) for chunk in chunks]
    events.append(DONE)
    bounds = [0, *sorted(cuts), len(events)]
    batches = []
    try:
        for start, end in pairwise(bounds):
            batches.append(reader.feed(b"".join(events[start:end])))
        batches.append(reader.on_end(is_framed=True))
    except MaitredError as failure:
        return batches, type(failure), str(failure)
    return batches, reader.is_complete, ""


@given(st.lists(USUAL_CHUNKS, max_size=6), st.sampled_from([1, 1, 2]), st.sets(st.integers(0, 6)))
def test_a_usual_chunk_says_what_it_says_with_a_member_of_no_meaning(chunks, choices, cuts):
    """A chunk with one more member is read by the long way, which keeps whatever it does not know."""
    cuts = {cut for cut in cuts if cut <= len(chunks)}
    assert read(chunks, choices, cuts) == read(chunks, choices, cuts, error=None)
