"""The blocks of a server that speaks Messages reach a client of Messages as they are, streamed and whole."""

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from maitred.api.messages import MessagesFormatter
from maitred.api.streaming import CollectedChoice
from maitred.core.context import RequestContext
from maitred.core.request import Usage
from maitred.replica.upstream.event_stream import EventStreamParser
from maitred.replica.upstream.secret_mask import DeltaMask
from maitred.wire.anthropic.answer import MessagesStreamParser
from maitred.wire.sse import SSEDecoder

TEXTS = st.lists(st.sampled_from(["a", "s", "sk", "é\n", '"']), min_size=1, max_size=2)
INPUTS = st.sampled_from(['{"a": 1}', "{}", '{"b": "}{"}'])
RESULT = {"type": "web_search_tool_result", "tool_use_id": "t", "content": [{"type": "web_search_result", "url": "u"}]}


def block(kind, first, deltas, last):
    """A block as a pair: its events but their indexes, and the whole."""
    first = {"type": kind, **first}
    deltas = [{"type": name, member: value} for name, member, value in deltas]
    return [
        ("content_block_start", {"content_block": first}),
        *(("content_block_delta", {"delta": delta}) for delta in deltas),
        ("content_block_stop", {}),
    ], {**first, **last}


def text(pieces, cited):
    citations = [{"type": "char_location", "cited_text": "q"}] * cited
    deltas = [("text_delta", "text", piece) for piece in pieces]
    deltas += [("citations_delta", "citation", citation) for citation in citations]
    return block("text", {"text": ""}, deltas, {"text": "".join(pieces), **({"citations": citations} if cited else {})})


def thought(pieces):
    deltas = [*(("thinking_delta", "thinking", piece) for piece in pieces), ("signature_delta", "signature", "sig")]
    empty = {"thinking": "", "signature": ""}
    return block("thinking", empty, deltas, {"thinking": "".join(pieces), "signature": "sig"})


def call(kind, written, cut):
    deltas = [("input_json_delta", "partial_json", piece) for piece in (written[:cut], written[cut:])]
    return block(kind, {"id": "t", "name": "f", "input": {}}, deltas, {"input": json.loads(written)})


BLOCKS = st.one_of(
    st.builds(text, TEXTS, st.integers(0, 1)),
    st.builds(thought, TEXTS),
    st.builds(call, st.sampled_from(["tool_use", "server_tool_use"]), INPUTS, st.integers(0, 3)),
    st.just(block("redacted_thinking", {"data": "x"}, [], {})),
    st.just(block(RESULT["type"], RESULT, [], {})),
)


def sent(blocks):
    events = [("message_start", {"message": {"content": [], "usage": {"input_tokens": 5}}})]
    for index, (of_block, _) in enumerate(blocks):
        events += [(kind, {"index": index, **fields}) for kind, fields in of_block]
    events += [
        ("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 9}}),
        ("message_stop", {}),
    ]
    return [b"data: " + msgspec.json.encode({"type": kind, **fields}) + b"\n\n" for kind, fields in events]


def answered(data, secrets):
    parser, mask, parts = EventStreamParser("there", MessagesStreamParser()), DeltaMask(secrets), []
    for piece in data:
        batch = parser.feed(piece)
        if batch is not None and mask.is_concerned(batch):
            batch = mask.apply(batch)
        parts += [] if batch is None else batch.parts
    assert parser.is_complete
    return parts


def streamed(events):
    """The blocks that a client puts together."""
    blocks, written = [], ""
    for event in SSEDecoder().feed(events):
        match msgspec.json.decode(event.data):
            case {"type": "content_block_start", "content_block": first}:
                blocks.append(first)
            case {"type": "content_block_delta", "delta": {"type": "citations_delta", "citation": citation}}:
                blocks[-1]["citations"] = [*blocks[-1].get("citations", ()), citation]
            case {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": piece}}:
                written += piece
                blocks[-1]["input"] = written
            case {"type": "content_block_delta", "delta": delta}:
                ((member, piece),) = ((name, value) for name, value in delta.items() if name != "type")
                blocks[-1][member] = blocks[-1].get(member, "") + piece
            case {"type": "content_block_stop"} if written:
                blocks[-1]["input"], written = json.loads(written), ""
    return blocks


def joined(blocks):
    """Blocks of which neighbouring texts without citations are one."""
    some = []
    for entry in blocks:
        is_text = entry["type"] == "text" and not entry.get("citations")
        if is_text and some and some[-1]["type"] == "text" and not some[-1].get("citations"):
            some[-1] = {**some[-1], "text": some[-1]["text"] + entry["text"]}
        else:
            some.append({name: value for name, value in entry.items() if value != [] or name != "citations"})
    return some


@given(st.lists(BLOCKS, min_size=1, max_size=5), st.booleans(), st.sampled_from([(), ("sk-ant-0123456789",)]))
def test_blocks_reach_a_client_as_they_are(blocks, at_once, secrets):
    data = sent(blocks)
    parts = answered([b"".join(data)] if at_once else data, secrets)
    form = MessagesFormatter("msg_1", RequestContext("req-1", 0.0, model="m"), thoughts=True)
    events = form.start() + b"".join(form.events([part]) for part in parts) + form.end(Usage(5, 9))
    whole = CollectedChoice()
    for part in parts:
        whole.add(part)
    expected = joined([entry for _, entry in blocks])
    assert joined(streamed(events)) == expected
    form = MessagesFormatter("msg_1", RequestContext("req-1", 0.0, model="m"), thoughts=True)
    assert joined(msgspec.json.decode(form.whole([whole], Usage(5, 9)))["content"]) == expected
