import math

import pytest

from maitred.load.report import quantity


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (9.994, "9.99"),
        (9.996, "10.0"),
        (99.96, "100"),
        (999.6, "1,000"),
        (12345.6, "12,346"),
        (-2.5, "-2.50"),
        (math.nan, "–"),
    ],
)
def test_three_digits(value: float, text: str) -> None:
    assert quantity.significant(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (0.0, "0 s"),
        (0.00031249, "312 µs"),
        (0.0312, "31.2 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (119.0, "119 s"),
        (125.4, "2 min 5 s"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert quantity.duration(seconds) == text


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (None, "–"),
        (0, "0 %"),
        (0.0001, "< 0.1 %"),
        (0.5, "50.0 %"),
        (0.99999, "99.9 %"),
        (1, "100 %"),
        (1.2, "120.0 %"),
    ],
)
def test_only_all_is_all(part: float | None, text: str) -> None:
    assert quantity.share(part) == text


@pytest.mark.parametrize(
    ("text", "short"),
    [("50.0 ms", "50 ms"), ("1.50 s", "1.5 s"), ("100 ms", "100 ms"), ("95.0 %", "95 %"), ("1,000", "1,000")],
)
def test_chosen_numbers_need_no_zeros(text: str, short: str) -> None:
    assert quantity.exact(text) == short


def test_sizes_and_counts() -> None:
    assert quantity.size(61_000_000) == "58.2 MiB"
    assert quantity.size(3 * 2**30) == "3.00 GiB"
    assert quantity.plural(1, "run") == "1 run"
    assert quantity.plural(1200, "run") == "1,200 runs"
    assert quantity.rate(12.3) == "12.3/s"
    assert quantity.rate(12.3, "requests") == "12.3 requests/s"
