"""What of a broken stream another server may be given to go on with, for any text and request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.app.request.continuation import TextContinuation
from maitred.core.inference import TextDelta
from maitred.core.text_replica import TextRequest

USER = [{"role": "user", "content": "Count."}]


def continuation(text, *, max_tokens=8, chat=True, choices=1, **fields):
    asked = {"model": "m", **({"messages": USER} if chat else {"prompt": "Count: "}), **fields}
    made = TextContinuation(TextRequest("id", asked, choices, max_tokens, chat), 1)
    made.on_delta(TextDelta(0, piece) for piece in text)
    return made


@given(
    pieces=st.lists(st.text(), min_size=1),
    tokens=st.integers(1, 20),
    max_tokens=st.none() | st.integers(1, 20),
    least=st.none() | st.integers(0, 30),
    chat=st.booleans(),
)
def test_the_rest_and_what_was_given_are_the_whole(pieces, tokens, max_tokens, least, chat):
    fields = {} if least is None else {"min_tokens": least}
    rest = continuation(pieces, max_tokens=max_tokens, chat=chat, **fields).remaining_request(tokens)
    text = "".join(pieces)
    left = max_tokens is None or max_tokens > tokens
    assert (rest is not None) == (bool(text) and left and not (chat and text[-1].isspace()))
    if rest is not None:
        assert rest.given == text
        assert rest.max_tokens is None or rest.max_tokens + tokens == max_tokens
        assert rest.fields.get("min_tokens", 0) == (max(0, least - tokens) if least else 0)


@given(text=st.text(st.sampled_from("ab"), min_size=1), stops=st.lists(st.text(st.sampled_from("ab"), min_size=1)))
def test_a_stop_string_that_may_have_begun_is_not_broken_in_two(text, stops):
    begun = any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))
    assert (continuation([text], stop=stops).remaining_request(1) is None) == begun


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{}]},
        {"response_format": {"type": "text"}},
        {"frequency_penalty": -0.1},
        {"n": 2},
        {"something_new": 1},
        {"messages": [*USER, {"role": "assistant", "content": "0"}]},
    ],
)
def test_what_is_not_known_to_be_safe_is_not_gone_on_with(fields):
    assert continuation(["0 1"], **fields).remaining_request(2) is None


@pytest.mark.parametrize("fields", [{"n": 1}, {"presence_penalty": 0.0}, {"temperature": 1.5}, {"tools": []}])
def test_what_asks_for_nothing_is(fields):
    assert continuation(["0 1"], **fields).remaining_request(2).given == "0 1"


def test_several_prompts_choices_and_prompts_in_tokens_are_not():
    assert continuation(["0"], choices=2).remaining_request(1) is None
    assert continuation(["0"], chat=False, prompt=[1, 2]).remaining_request(1) is None
    assert continuation(["0"], chat=False, prompt=["a"]).remaining_request(1) is None


def test_a_thought_and_a_call_are_not():
    for extra in ({"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}):
        made = continuation(["0"])
        made.on_delta([TextDelta(0, " 1", extra=extra)])
        assert made.remaining_request(2) is None
