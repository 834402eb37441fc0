"""Byte sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.config.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("512 B", 512),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("10mib", 10 << 20),
        (" 1.5GiB ", 3 << 29),
        ("2TB", 2 * 10**12),
        ("1_000", 1000),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "1M", "1K", "1.5", "0.1KiB", "-1", "1 MiB x", "1e3", "_", "١MiB", "1.", ".5GB"]
)
def test_what_is_not_a_size(text: str) -> None:
    assert parse_bytes(text) is None


@given(st.integers(0, 1 << 60))
def test_what_is_written_reads_back(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == size_bytes


@given(st.text())
def test_any_text_is_a_size_or_not(text: str) -> None:
    assert parse_bytes(text) is None or parse_bytes(text) >= 0
