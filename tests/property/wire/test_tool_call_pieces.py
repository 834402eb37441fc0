"""However a server names the calls of its pieces, they become the calls that it made."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from maitred.wire.openai.tool_calls import ToolCallAssembler
from maitred.wire.openai.written import merge_deltas

CALLS = st.lists(
    st.tuples(
        st.sampled_from(["f", "g", "ff"]),
        st.sampled_from(['{"a":1}', "{}", '{"b": "}{"}', '{"c":[1,2]}\n', '{"n":{}}', ' {"z":"{}"}', "{} ", ""]),
        st.sets(st.integers(1, 11), max_size=2),
    ),
    min_size=1,
    max_size=4,
)


def function(arguments, name=None):
    return {"arguments": arguments, **({} if name is None else {"name": name})}


def by_index(number, name, pieces):
    """As OpenAI's servers do it."""
    first, *others = pieces
    yield {"index": number, "id": f"c{number}", "function": function(first, name)}
    yield from ({"index": number, "function": function(piece)} for piece in others)


def by_text_of_index(number, name, pieces):
    for piece in by_index(number, name, pieces):
        yield {**piece, "index": str(number)}


def by_shared_index(number, name, pieces):
    for piece in by_index(number, name, pieces):
        yield {**piece, "index": 0}


def by_nothing(number, name, pieces):
    for piece in by_index(number, name, pieces):
        yield {member: value for member, value in piece.items() if member != "index"}


def by_id(number, name, pieces):
    for piece in by_nothing(number, name, pieces):
        yield {**piece, "id": f"c{number}"}


def by_late_id(number, name, pieces):
    first, *others = by_index(number, name, pieces)
    yield {"index": number, "function": first["function"]}
    yield from ({**piece, "id": f"c{number}"} for piece in others)


def by_name_in_each(number, name, pieces):
    for piece in by_index(number, name, pieces):
        yield {**piece, "function": {**piece["function"], "name": name}}


def by_everything_in_each(number, name, pieces):
    for piece in by_name_in_each(number, name, pieces):
        yield {**piece, "id": f"c{number}", "type": "function"}


def by_the_whole_at_the_end(number, name, pieces):
    yield from by_index(number, name, pieces)
    if len(pieces) > 1:
        yield {"index": number, "id": f"c{number}", "function": function("".join(pieces), name)}


SERVERS = [
    *(by_index, by_text_of_index, by_shared_index, by_nothing, by_id, by_late_id),
    *(by_name_in_each, by_everything_in_each, by_the_whole_at_the_end),
]


@given(CALLS, st.sampled_from(SERVERS))
def test_pieces_become_the_calls_that_were_made(calls, server):
    assembler, deltas = ToolCallAssembler(), []
    for number, (name, written, cuts) in enumerate(calls):
        bounds = [0, *sorted(cut for cut in cuts if cut < len(written)), len(written)]
        pieces = [written[start:end] for start, end in pairwise(bounds)]
        deltas += [assembler.add([piece]) for piece in server(number, name, pieces)]
    deltas.append(assembler.close())
    message = merge_deltas({"tool_calls": pieces} for pieces in deltas if pieces)
    made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert made == [(name, json.loads(written or "{}")) for name, written, _ in calls]
    assert len({call["id"] for call in message["tool_calls"]} - {""}) == len(calls)
