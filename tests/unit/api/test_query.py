"""The query of a call's address."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.api.exchange import HttpExchange
from maitred.core.errors import InvalidRequest


def query_of(raw):
    return HttpExchange({"path": "/", "method": "GET", "headers": [], "query_string": raw}, None, None, 0.0).query


@pytest.mark.parametrize(
    ("raw", "parameters"),
    [
        (b"", []),
        (b"a=1&b=", [("a", "1"), ("b", "")]),
        (b"a=1&a=2", [("a", "1"), ("a", "2")]),
        (b"a=x%26y%3Dz+%2B", [("a", "x&y=z +")]),
        (b"a=%C3%BC", [("a", "ü")]),
        (b"a", [("a", "")]),
        (b"&&", []),
    ],
)
def test_parameters_in_their_order(raw, parameters):
    assert query_of(raw) == parameters


def test_a_call_without_a_query():
    assert HttpExchange({"path": "/", "method": "GET", "headers": []}, None, None, 0.0).query == []


@pytest.mark.parametrize("raw", [b"a=%ff", b"\xff", b"&".join(b"a%d=1" % number for number in range(51))])
def test_what_cannot_be_read_is_refused(raw):
    with pytest.raises(InvalidRequest, match="cannot be read"):
        query_of(raw)


@given(st.binary(max_size=200))
def test_any_bytes_are_parameters_or_refused(raw):
    try:
        assert all(isinstance(text, str) for pair in query_of(raw) for text in pair)
    except InvalidRequest as error:
        assert error.message.endswith(".")  # noqa: PT017
