"""Writing settings back."""

import os
from pathlib import Path

import pytest

from maitred.config.loader import load
from maitred.config.render import written, yaml_of
from maitred.core.secret import Secret

SETTINGS = {
    "MAITRED__MODEL__PATH": "0777",
    "MAITRED__MODEL__SERVED_NAME": "a: b # c",
    "MAITRED__ENGINE__KV_MEMORY_BYTES": "1536KiB",
    "MAITRED__ENGINE__PREFIX_CACHE": "false",
    "MAITRED__SERVER__MAX_BODY_BYTES": "5000",
    "MAITRED__SERVER__DRAIN_GRACE_S": "0.25",
}


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("with_origins", [False, True])
def test_what_is_shown_reads_back(with_origins: bool) -> None:
    before = load(None, SETTINGS)
    Path("shown.yaml").write_text(yaml_of(before, with_origins=with_origins))
    assert load(Path("shown.yaml")).config == before.config


def test_origins_stand_beside_the_values() -> None:
    shown = yaml_of(load(None, SETTINGS), with_origins=True)
    lines = [tuple(part.strip() for part in line.split("  # ")) for line in shown.splitlines()]
    assert ("kv_memory_bytes: 1536KiB", "MAITRED__ENGINE__KV_MEMORY_BYTES") in lines
    assert ("port: 8000", "default") in lines


def test_a_secret_is_written_as_its_reference() -> None:
    assert written(Secret("hunter2", "{env: KEY}")) == "{env: KEY}"


def test_the_process_environment_is_a_sound_layer() -> None:
    assert load(None, os.environ).config == load().config
