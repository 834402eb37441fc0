import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.store.usage import csv_cell, csv_lines


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"])
def test_no_cell_begins_like_a_formula(start):
    assert csv_cell(f'{start}HYPERLINK("http://elsewhere")') == f'\'{start}HYPERLINK("http://elsewhere")'


def test_numbers_and_plain_text_stay():
    assert csv_lines([("acme", -3, 0.5, None, 'a "b", c')]) == 'acme,-3,0.5,,"a ""b"", c"\r\n'


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_what_is_read_back_is_what_was_there(row):
    (read,) = csv.reader(io.StringIO(csv_lines([row]), newline=""))
    assert read == [csv_cell(value) for value in row]
    assert not any(value.startswith(("=", "+", "-", "@")) for value in read)
