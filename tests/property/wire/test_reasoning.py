"""However an answer is cut into pieces, the same part of it is the thought; and nothing but white space is lost."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.text.reasoning import CLOSE, OPEN, ReasoningParser
from maitred.text.special_tokens import SpecialTokenText

WITHOUT_TOKENS, WITH_TOKENS = SpecialTokenText({OPEN: None, CLOSE: None}), SpecialTokenText({OPEN: 7, CLOSE: 8})
marks = st.sampled_from([WITHOUT_TOKENS, WITH_TOKENS])
answers = st.lists(st.sampled_from([OPEN, CLOSE, " ", "\n", "<", "<thi", "</th", "Hm.", "A bird", "🙂"]), max_size=10)


def read(parser, chunks):
    pairs = [*(parser.push(chunk) for chunk in chunks), parser.flush()]
    return "".join(thought for thought, _ in pairs), "".join(answer for _, answer in pairs)


def written(parts, marks):
    return "".join(marks[part] if part in (OPEN, CLOSE) else part for part in parts)


@given(answers, marks, st.booleans(), st.integers(1, 7))
def test_cutting_changes_nothing(parts, marks, inside, length):
    text = written(parts, marks)
    whole = read(ReasoningParser(marks, inside=inside), [text])
    cut = [text[at : at + length] for at in range(0, len(text), length)]
    assert read(ReasoningParser(marks, inside=inside), cut) == whole
    assert "".join("".join(whole).split()) == "".join(_without_tags(text, marks, inside=inside).split())


def _without_tags(text, marks, *, inside):
    """The answer without the tags of its thought."""
    if not inside:
        if not text.lstrip().startswith(marks[OPEN]):
            return text
        text = text.replace(marks[OPEN], "", 1)
    return text.replace(marks[CLOSE], "", 1)


@given(marks, st.booleans())
def test_a_thought_ends_where_its_tag_stands(marks, inside):
    opening = "" if inside else f" {marks[OPEN]}"
    parser = ReasoningParser(marks, inside=inside)
    assert read(parser, [f"{opening}\nIs it a bird?\n\n", f"{marks[CLOSE]}\n\n", " A bird.\n"]) == (
        "Is it a bird?",
        "A bird.\n",
    )
    assert not parser.thinking


def test_only_a_beginning_is_a_thought():
    parser = ReasoningParser(WITH_TOKENS, inside=False)
    text = f"A bird. {WITH_TOKENS[OPEN]} No. {WITH_TOKENS[CLOSE]}"
    assert read(parser, [text]) == ("", text)
    assert WITH_TOKENS.literal(text) == "A bird. <think> No. </think>"


def test_a_thought_that_is_never_closed_is_all_there_is():
    parser = ReasoningParser(WITHOUT_TOKENS, inside=False)
    assert read(parser, ["<think>Is it a bird? Or </thi"]) == ("Is it a bird? Or </thi", "")
    assert parser.thinking
