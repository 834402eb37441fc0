"""Changing single settings in a file that people write."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from maitred.config.edit import set_values, value_lines, write_values
from maitred.core.errors import InvalidRequest

CHANGES = {"engine.max_sequences": 24, "engine.itl_objective_s": 0.05}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "engine:\n  max_sequences: 24\n"),
        ("# Ours.\nlog:\n  level: debug", "# Ours.\nlog:\n  level: debug\nengine:\n  max_sequences: 24\n"),
        (
            "engine:\n    device: cpu  # no GPU\nlog: {level: debug}\n",
            "engine:\n    max_sequences: 24\n    device: cpu  # no GPU\nlog: {level: debug}\n",
        ),
        (
            "engine:\n  # A comment above.\n  max_sequences: 8   # few\n  device: cpu\n",
            "engine:\n  # A comment above.\n  max_sequences: 24   # few\n  device: cpu\n",
        ),
        ("engine: {device: cpu}  # short\n", "engine: {max_sequences: 24, device: cpu}  # short\n"),
        ("engine: {}\n", "engine: {max_sequences: 24}\n"),
        ("engine:\nlog:\n  level: debug\n", "engine:\n  max_sequences: 24\nlog:\n  level: debug\n"),
        ("engine: null\n", "engine:\n  max_sequences: 24\n"),
        ("engine:\n  max_sequences:\n", "engine:\n  max_sequences: 24\n"),
        ('engine:\n  max_sequences: "8"\n', "engine:\n  max_sequences: 24\n"),
        ("---\nengine:\r\n  device: cpu\r\n", "---\nengine:\r\n  max_sequences: 24\n  device: cpu\r\n"),
        (
            "store:\n  path: ü\nengine:\n  device: cpu\n",
            "store:\n  path: ü\nengine:\n  max_sequences: 24\n  device: cpu\n",
        ),
    ],
)
def test_the_rest_of_the_text_stays(before: str, after: str) -> None:
    assert set_values(before, {"engine.max_sequences": 24}) == after
    assert set_values(after, {"engine.max_sequences": 24}) == after


def test_several_settings() -> None:
    assert set_values("engine:\n  device: cpu\n", {**CHANGES, "log.x": 1}) == (
        "engine:\n  max_sequences: 24\n  itl_objective_s: 0.05\n  device: cpu\nlog:\n  x: 1\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "base: &base {device: cpu}\nengine: *base\n",
        "{log: {level: debug}}",
        "log:\n  level: debug\n...\n",
        "engine: fast\n",
        "engine: [1]\n",
    ],
)
def test_a_file_that_cannot_be_edited_is_reported_with_the_lines_to_add(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        set_values(text, CHANGES, "maitred.yaml")
    assert caught.value.message.endswith("engine:\n  max_sequences: 24\n  itl_objective_s: 0.05")


def test_what_is_no_yaml_is_left_alone() -> None:
    with pytest.raises(InvalidRequest, match=r"maitred.yaml:1: Not valid YAML.* Mend that first"):
        set_values("engine: [", CHANGES, "maitred.yaml")


def test_a_file_keeps_its_permissions_and_a_link_its_target(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "maitred.yaml"
    real.write_text("engine:\n  device: cpu\n")
    real.chmod(0o640)
    link.symlink_to(real)
    write_values(link, CHANGES)
    assert link.is_symlink()
    assert "max_sequences: 24" in real.read_text()
    assert real.stat().st_mode & 0o777 == 0o640
    assert {file.name for file in tmp_path.iterdir()} == {"real.yaml", "maitred.yaml"}


def test_a_file_is_made_where_there_is_none(tmp_path: Path) -> None:
    write_values(tmp_path / "new.yaml", CHANGES)
    assert (tmp_path / "new.yaml").read_text() == value_lines(CHANGES) + "\n"


@pytest.mark.parametrize("name", [".", "missing/maitred.yaml"])
def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="Cannot change"):
        write_values(tmp_path / name, CHANGES)


NAMES = st.sampled_from(["engine", "log", "max_sequences", "device"])
SCALARS = st.sampled_from(["1", "cpu", "'a: b'", '"# x"', "", "null", "|\n      text\n", "[1, 2]", "{a: 1}"])
TEXTS = st.dictionaries(NAMES, st.dictionaries(NAMES, SCALARS, max_size=3), max_size=3).map(
    lambda sections: "".join(
        f"{name}:  # {name}\n" + "".join(f"  {setting}: {value}\n" for setting, value in below.items())
        for name, below in sections.items()
    )
)


@given(TEXTS, st.integers(1, 1000))
def test_nothing_else_ever_changes(text: str, value: int) -> None:
    """Whatever is in the file, the result says the same but for the setting, or there is none."""
    try:
        changed = set_values(text, {"engine.max_sequences": value})
    except InvalidRequest:
        return
    assert "# engine" in changed or "# engine" not in text
    before, after = yaml.load(text, yaml.BaseLoader) or {}, yaml.load(changed, yaml.BaseLoader)
    assert after.pop("engine") == {**(before.pop("engine", None) or {}), "max_sequences": str(value)}
    assert after == before
