"""The text by which a model is chosen."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.core.inference import Conversation
from maitred.routing.auto.prompt import HEAD_CHARACTERS, TAIL_CHARACTERS, prompt_text


def message(role, content):
    return {"role": role, "content": content}


def test_the_last_words_of_the_person_count():
    turns = [
        message("system", "Be brief."),
        message("user", "Hi"),
        message("assistant", "Hello"),
        message("user", "Why?"),
    ]
    assert prompt_text(Conversation(turns)) == "Why?"
    assert prompt_text(Conversation([*turns, message("assistant", "Because"), message("tool", "42")])) == "Why?"
    parts = [
        {"type": "text", "text": "What is"},
        {"type": "image_url", "image_url": {}},
        {"type": "text", "text": "it?"},
    ]
    assert prompt_text(Conversation([message("user", parts)])) == "What is\nit?"


def test_what_cannot_be_read_has_no_text():
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    for messages in (
        [],
        [message("system", "Be brief.")],
        [message("user", image)],
        [message("user", None)],
        [message("user", 3)],
    ):
        assert prompt_text(Conversation(messages)) is None
    assert prompt_text([1, 2, 3]) is None
    assert prompt_text(" \n") is None


@given(st.text(min_size=1).filter(str.strip), st.integers(1, 2000))
def test_a_long_text_is_known_by_its_ends(text, times):
    whole = text * times
    shown = prompt_text(whole)
    if len(whole) <= HEAD_CHARACTERS + TAIL_CHARACTERS:
        assert shown == whole
    elif shown is not None:
        assert len(shown) == HEAD_CHARACTERS + TAIL_CHARACTERS + 1
        assert (whole[:HEAD_CHARACTERS], whole[-TAIL_CHARACTERS:]) == (
            shown[:HEAD_CHARACTERS],
            shown[-TAIL_CHARACTERS:],
        )
