"""Guards on any text."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.text.question_guards import Difference, difference, skip_reason
from maitred.text.wording import Wording

WORDS = st.sampled_from(
    [
        "where",
        "is",
        "my",
        "card",
        "from",
        "Paris",
        "not",
        "can't",
        "7",
        "٣",
        "monday",
        "`ls`",
        "“a”",
        "x@y.org",
        "A-1",
        "?",
    ]
)
TEXTS = st.text(max_size=60) | st.lists(WORDS, max_size=12).map(" ".join)
PLAIN = st.lists(
    st.sampled_from(["where", "is", "my", "card", "can", "i", "pay", "the", "fee"]), min_size=1, max_size=9
)


@given(TEXTS, TEXTS)
def test_two_questions_differ_whichever_was_asked(one, other):
    a, b = Wording.of(one), Wording.of(other)
    assert (difference(a, b) is None) == (difference(b, a) is None)


@given(TEXTS, st.booleans())
def test_a_question_does_not_differ_from_itself_but_where_a_name_has_two_places(text, in_conversation):
    wording = Wording.of(text)
    skip_reason(wording, in_conversation=in_conversation)
    assert difference(wording, wording) in (None, Difference.NAMES)
    if len(set(wording.words)) == len(wording.words):
        assert difference(wording, wording) is None


@given(PLAIN, st.integers(0, 10**12), st.integers(0, 10**12), st.sampled_from("0٠०０"), st.integers(0, 9))
def test_another_number_is_noticed_in_any_script(words, one, other, zero, place):
    def text(number):
        digits = "".join(chr(ord(zero) + int(digit)) for digit in str(number))
        return " ".join([*words[:place], digits, *words[place:]])

    found = difference(Wording.of(text(one)), Wording.of(text(other)))
    assert found is (None if one == other else Difference.NUMBERS)
    assert difference(Wording.of(text(one)), Wording.of(" ".join(words))) is Difference.NUMBERS


@given(PLAIN, st.sampled_from(["not", "never", "without", "isn't", "don’t", "cannot"]), st.integers(0, 9))
def test_one_more_negation_is_noticed(words, negation, place):
    negated = " ".join([*words[:place], negation, *words[place:]])
    assert difference(Wording.of(negated), Wording.of(" ".join(words))) is Difference.NEGATIONS
