"""Which server a load run talks to: that of the other commands, unless it is told another."""

from pathlib import Path

import pytest

from maitred.cli.load.flags import SPEC_FLAGS
from maitred.cli.load.spec import read_spec

GIVEN: dict[str, object] = {flag.parameter: None for flag in SPEC_FLAGS} | {
    **{"set": None, "objective": None, "tenant": None},
    "users": "1",
}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAITRED_URL", "http://there:1")
    monkeypatch.setenv("MAITRED_API_KEY", "sk-mtd-a-b")


def test_the_variables_of_the_other_commands_say_where_and_as_whom() -> None:
    target = read_spec(None, GIVEN).target
    assert target.url == "http://there:1"
    assert target.api_key is not None
    assert target.api_key.reveal() == "sk-mtd-a-b"


def test_file_and_options_say_it_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER", "other key")
    file = tmp_path / "load.yaml"
    file.write_text("target: {url: 'http://file:1', api_key: {env: OTHER}}\n")
    target = read_spec(file, GIVEN).target
    assert target.url == "http://file:1"
    assert target.api_key is not None
    assert target.api_key.reveal() == "other key"
    assert read_spec(file, GIVEN | {"url": "http://option:1"}).target.url == "http://option:1"


def test_without_them_it_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAITRED_URL")
    monkeypatch.setenv("MAITRED_API_KEY", "")
    target = read_spec(None, GIVEN).target
    assert (target.url, target.api_key) == ("http://127.0.0.1:8000", None)
