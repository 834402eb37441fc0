"""How arguments of the administration's commands become times."""

import pytest

from maitred.cli import keys, limits, usage
from maitred.cli.options import load_settings, parse_duration
from maitred.core.errors import ConfigInvalid, InvalidRequest


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("7d", "-7d"),
        ("12h", "-12h"),
        ("-7d", "-7d"),
        ("now", "now"),
        ("2026-11-01", "2026-11-01"),
        ("7 days", "7 days"),
    ],
)
def test_how_far_back(text: str, sent: str) -> None:
    assert usage._time("--since", text) == sent


@pytest.mark.parametrize("text", ["7", "-7", "1.5", "1795783819"])
def test_how_far_back_needs_a_unit(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--since must be a time with its unit"):
        usage._time("--since", text)


@pytest.mark.parametrize(("text", "seconds"), [("1d", 86_400), ("90s", 90), ("0", 0), ("1.5h", 5400)])
def test_overlap(text: str, seconds: float) -> None:
    assert parse_duration("--overlap", text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "nan", "1 fortnight", "90", "1.5"])
def test_what_is_no_overlap(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--overlap must be a time with its unit"):
        parse_duration("--overlap", text)


def test_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    assert keys._expiry(None) is None
    assert keys._expiry("90d") == 1000.0 + 90 * 86_400
    assert keys._expiry("2027-01-01T00:00:00Z") == "2027-01-01T00:00:00Z"
    assert keys._expiry("2027-01-01") == "2027-01-01"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_what_is_no_limit(value: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"VALUE must be a number of .* got {value}\."):
        limits.set_limit("tenant:acme", "tokens_per_minute", float(value))


def test_a_size_of_an_option_needs_its_unit() -> None:
    flags = {"engine.kv_memory_bytes": ("--kv-memory", "2000000000")}
    with pytest.raises(ConfigInvalid, match="--kv-memory must be a size with its unit"):
        load_settings(None, None, flags)
    # The name of a setting has the unit.
    loaded = load_settings(None, ["engine.kv_memory_bytes=2000000000"], {})
    assert loaded.config.engine.kv_memory_bytes == 2_000_000_000
