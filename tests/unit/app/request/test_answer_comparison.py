"""An answer that is computed again: what its readers have is left out, and another answer is noticed."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from maitred.app.request.answer_comparison import AnswerComparison
from maitred.core.errors import ReplicaLost
from maitred.core.inference import ChunkMetadata, TextDelta, TokenLogprob, TokenScore
from maitred.core.request import FinishReason


def score(text):
    return TokenScore(TokenLogprob(text, text.encode(), -0.5), [], 0)


def start_of_call(number, id_, name):
    return TextDelta(
        0, "", extra={"tool_calls": [{"index": number, "id": id_, "type": "function", "function": {"name": name}}]}
    )


def arguments(number, text):
    return TextDelta(0, "", extra={"tool_calls": [{"index": number, "function": {"arguments": text}}]})


def thought(text):
    return TextDelta(0, "", extra={"reasoning_content": text, "reasoning": text})


END = TextDelta(0, "", FinishReason.STOP)


def read(sent, *batches):
    comparison = AnswerComparison(sent)
    rest = [part for batch in batches for part in comparison.rest(batch)]
    return rest, comparison.is_over


def test_text_is_left_out_however_it_is_cut():
    sent = [TextDelta(0, "one "), TextDelta(0, "tw")]
    rest, is_over = read(sent, [TextDelta(0, "on")], [TextDelta(0, "e t"), TextDelta(0, "wo")], [END])
    assert rest == [TextDelta(0, "o"), END]
    assert is_over


def test_nothing_was_sent():
    assert read([TextDelta(0, "")], [TextDelta(0, "one")]) == ([TextDelta(0, "one")], True)


@pytest.mark.parametrize(
    "again",
    [
        [TextDelta(0, "uno")],
        [TextDelta(0, "on"), END],
        [thought("one")],
        [TextDelta(0, "one", FinishReason.LENGTH)],
        [TextDelta(0, "one", block={"type": "x"})],
    ],
)
def test_another_answer_is_noticed(again):
    sent = [TextDelta(0, "one"), END]
    with pytest.raises(ReplicaLost):
        read(sent, again)


@pytest.mark.parametrize(
    "sent",
    [TextDelta(0, "", block={"type": "x"}), TextDelta(0, "", extra={"audio": {}}), TextDelta(0, "a", continued=True)],
)
def test_what_cannot_be_compared_is_not_gone_on_with(sent):
    with pytest.raises(ReplicaLost):
        AnswerComparison([sent])


def test_tool_calls_keep_the_id_that_the_readers_have():
    sent = [thought("Hm."), start_of_call(0, "call_a", "add"), arguments(0, '{"x":')]
    again = [[thought("H")], [thought("m.")], [start_of_call(0, "call_b", "add"), arguments(0, '{"x": 1}')]]
    rest, is_over = read(sent, *again, [start_of_call(1, "call_c", "add")], [END])
    assert rest == [arguments(0, " 1}"), start_of_call(1, "call_c", "add"), END]
    assert is_over


def test_log_probabilities_and_token_ids_are_counted():
    sent = [TextDelta(0, "ab", scores=[score("a"), score("b")], token_ids=[1, 2])]
    again = [TextDelta(0, "abc", scores=[score("a"), score("b"), score("c")], token_ids=[1, 2, 3])]
    assert read(sent, again) == ([TextDelta(0, "c", scores=[score("c")], token_ids=[3])], True)
    with pytest.raises(ReplicaLost):
        read(sent, [TextDelta(0, "abc", token_ids=[1, 4, 3])])


def test_metadata_of_what_is_left_out_is_left_out():
    again = [TextDelta(0, "one", metadata=ChunkMetadata({"system_fingerprint": "b"}))]
    assert read([TextDelta(0, "on")], again) == ([TextDelta(0, "e")], True)


def cut(text, lengths):
    """Deltas of two choices with the same text, batch by batch."""
    pieces = []
    for length in lengths:
        pieces.append(text[:length])
        text = text[length:]
    pieces = [piece for piece in [*pieces, text] if piece] or [""]
    ends = [None] * (len(pieces) - 1) + [FinishReason.STOP]
    return [[TextDelta(index, piece, end) for index in (0, 1)] for piece, end in zip(pieces, ends, strict=True)]


def text_of(batches, index):
    return "".join(part.text for batch in batches for part in batch if part.index == index)


CUTS = st.lists(st.integers(1, 5), max_size=12)


@given(st.text(min_size=1, max_size=40), CUTS, CUTS, st.data())
def test_what_was_sent_and_the_rest_are_the_whole(text, first, second, data):
    before = cut(text, first)
    sent = before[: data.draw(st.integers(0, len(before)))]
    comparison = AnswerComparison([part for batch in sent for part in batch])
    rest = [comparison.rest(batch) for batch in cut(text, second)]
    assert comparison.is_over
    for index in (0, 1):
        assert text_of([*sent, *rest], index) == text
        ends = [part for batch in [*sent, *rest] for part in batch if part.index == index and part.finish is not None]
        assert len(ends) == 1


@given(st.text("ab", min_size=1, max_size=20), st.text("ab", max_size=20), CUTS, CUTS)
def test_two_answers_are_never_mixed(text, other, first, second):
    sent = cut(text, first)[:-1] or cut(text, first)
    had = text_of(sent, 0)
    assume(not other.startswith(had) and other)
    comparison, passed = AnswerComparison([part for batch in sent for part in batch]), []
    with pytest.raises(ReplicaLost):
        passed.extend(comparison.rest(batch) for batch in cut(other, second))
    assert text_of(passed, 0) == ""
