import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Column, Double, String
from sqlalchemy.dialects import sqlite

from maitred.core.errors import InvalidRequest
from maitred.store.usage import decode_cursor, encode_cursor

COLUMNS = [Column("time_s", Double), Column("id", String)]


@given(st.floats(0, 4e9), st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_what_a_page_ended_with_comes_back(time_s, identity):
    values = decode_cursor(encode_cursor([time_s, identity]), COLUMNS)
    compiled = values.compile(dialect=sqlite.dialect())
    assert list(compiled.params.values()) == [time_s, identity]


@given(st.text())
def test_any_text_is_a_cursor_or_is_refused(text):
    with pytest.raises(InvalidRequest):
        decode_cursor(text, COLUMNS)


@pytest.mark.parametrize("values", [[], ["a"], ["a", "b"], [1.0], [1.0, "a\0b"], [1.0, "a", "b"]])
def test_the_cursor_of_another_question_is_refused(values):
    with pytest.raises(InvalidRequest):
        decode_cursor(encode_cursor(values), COLUMNS)


def test_one_row_for_everything_has_no_second_page():
    with pytest.raises(InvalidRequest):
        decode_cursor(encode_cursor([]), [])
