"""Detokenizer and stop window against what they are by definition, for any text cut anywhere."""

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from maitred.text.stop import StopWindow
from maitred.text.tokenizer import Detokenizer
from tests.support.tokenizers import byte_level, sentencepiece

FAMILIES = {
    "byte-level": cache(byte_level),
    "sentencepiece": cache(sentencepiece),
    "metaspace": cache(lambda: sentencepiece(metaspace=True)),
}
texts = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from("👋🏽👩\u200d👧🇫🇷\u0301\u0308世界。▁ \n"), max_size=60
)


def cut(data, sequence):
    """The sequence in pieces."""
    at = sorted(data.draw(st.lists(st.integers(0, len(sequence)), max_size=8)))
    return [sequence[start:end] for start, end in zip([0, *at], [*at, len(sequence)], strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_pieces_are_the_whole_text(family, data):
    tokenizer = FAMILIES[family]()
    random_tokens = st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=40)
    encoded = texts.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    tokens = data.draw(random_tokens | encoded)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(piece) for piece in cut(data, tokens)]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(tokens)


@pytest.mark.parametrize("family", FAMILIES)
@given(text=texts)
def test_no_character_shows_before_it_is_whole(family, text):
    tokenizer = FAMILIES[family]()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(tokens)
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for token in tokens:
        shown += detokenizer.push([token])
        assert whole.startswith(shown)
    assert shown == whole


@given(text=texts)
def test_text_survives_a_byte_level_vocabulary(text):
    tokenizer = FAMILIES["byte-level"]()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text
    assert tokenizer._backend.decode(tokens, skip_special_tokens=False) == text


def naive(stops, text):
    """What is shown of a text that comes character by character: cut before the stop string that completes first."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))], True
    return text, False


def begins_a_stop(stops, end):
    return any(stop.startswith(end) for stop in stops)


few = st.text("ab]", min_size=1, max_size=5)


@given(stops=st.lists(few, max_size=4), text=st.text("ab]", max_size=30), data=st.data())
@example(stops=["abaabab"], text="abaabaabab", data=None)
def test_any_pieces_stop_where_the_whole_text_does(stops, text, data):
    window = StopWindow(stops)
    shown, seen, stopped = "", "", False
    for piece in list(text) if data is None else cut(data, text):
        new, now = window.push(piece)
        assert not (stopped and new)
        shown, seen, stopped = shown + new, seen + piece, stopped or now
        if not stopped:
            held = seen[len(shown) :]
            assert seen == shown + held
            assert not held or begins_a_stop(stops, held)
            # Nothing that can still become a stop was shown.
            assert not any(begins_a_stop(stops, seen[at:]) for at in range(len(shown)))
    assert (shown + window.flush(), stopped) == naive(stops, text)


@given(text=st.one_of(texts, st.text("e\u0301\u1112\u1161\u11ab", max_size=200)))
def test_the_fewest_tokens_are_never_more_than_there_are(text):
    tokenizer = byte_level()
    assert tokenizer.fewest_tokens(len(text)) <= len(tokenizer.encode(text, add_special_tokens=False))
