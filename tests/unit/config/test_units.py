"""Durations."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.config.units import parse_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("90", 90.0),
        ("1e1", 10.0),
        (" 1.5 s ", 1.5),
        ("500ms", 0.5),
        ("250 µs", 0.00025),
        ("2m", 120.0),
        ("2min", 120.0),
        ("1.5h", 5400.0),
        ("1d", 86400.0),
        ("-3s", -3.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["", "s", "ms", "1 week", "1M", "1m30s", "inf", "nan s", "1e999", "١٢ x", "1e308d"])
def test_what_is_not_a_duration(text: str) -> None:
    assert parse_seconds(text) is None


@given(st.floats(0, 1e9))
def test_a_number_counts_seconds(seconds: float) -> None:
    assert parse_seconds(repr(seconds)) == seconds


@given(st.text())
def test_any_text_is_a_duration_or_not(text: str) -> None:
    seconds = parse_seconds(text)
    assert seconds is None or math.isfinite(seconds)
