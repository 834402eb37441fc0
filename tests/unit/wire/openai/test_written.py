"""Deltas of an answer as the members of its message."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.wire.openai.decode import decode_chat
from maitred.wire.openai.written import merge_deltas, request_fields


def thought(text):
    return {"reasoning_content": text, "reasoning": text}


def arguments(text, index=0):
    return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
OTHER = {**CALL, "index": 1, "id": "d"}
DELTAS = st.one_of(
    st.text("ab", max_size=2).map(thought),
    st.text("ab", max_size=2).map(lambda text: {"refusal": text}),
    st.text("ab", max_size=2).map(arguments),
    st.text("ab", max_size=2).map(lambda text: arguments(text, 1)),
    st.just({"annotations": [{"n": 1}]}),
)


@given(st.lists(DELTAS))
def test_how_texts_are_cut_into_deltas_does_not_matter(deltas):
    begun = [{"tool_calls": [CALL]}, {"tool_calls": [OTHER]}]
    merged = merge_deltas([*begun, *deltas])
    for name in ("reasoning_content", "reasoning", "refusal"):
        texts = [delta[name] for delta in deltas if name in delta]
        assert merged.get(name) == ("".join(texts) if texts else None)
    for index, call in enumerate(merged["tool_calls"]):
        pieces = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        written = "".join(piece["function"]["arguments"] for piece in pieces if piece["index"] == index)
        assert call == {"id": "cd"[index], "type": "function", "function": {"name": "f", "arguments": written}}


def test_a_text_is_joined_once_however_many_deltas_it_has():
    """One by one, so many would copy the text so often that it took hours."""
    deltas = [thought("word ")] * 400_000 + [arguments("12345")] * 100_000
    merged = merge_deltas([{"tool_calls": [CALL]}, *deltas])
    assert (len(merged["reasoning"]), len(merged["tool_calls"][0]["function"]["arguments"])) == (2_000_000, 500_000)


def test_what_is_said_of_caches_is_not_passed_on():
    body = b'{"model":"m","messages":[{"role":"user","content":"Hi"}],"cache":{"ttl":5},"seed":1}'
    request = decode_chat(body, strict=True)
    assert request_fields(request).keys() == {"model", "messages", "seed"}
    assert request.sent["cache"] == {"ttl": 5}
