"""What is known of loads from one run of the gateway to the next."""

import json

import pytest
from msgspec.structs import replace

from maitred.app.models.on_demand import open_local_models
from maitred.config.tree import BUNDLED_MODEL, Config, TextModelConfig
from maitred.core.clock import SystemClock
from maitred.fleet.residency.config import ResidencyConfig
from maitred.fleet.residency.load_times import LoadTimes
from maitred.store.config import StoreConfig


def test_what_was_learnt_is_there_in_the_next_run(tmp_path):
    file = tmp_path / "new" / "load-times.json"
    first = LoadTimes(file)
    assert first.expected_load_s(tmp_path / "a") is None
    first.record(tmp_path / "a", 4.25)
    first.record(tmp_path / "b", 9.0)
    first.record(tmp_path / "a", 5.0)
    second = LoadTimes(file)
    assert (second.expected_load_s(tmp_path / "a"), second.expected_load_s(tmp_path / "x" / ".." / "b")) == (5.0, 9.0)
    assert [path.name for path in file.parent.iterdir()] == ["load-times.json"]


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"/a": "soon"}', '{"/a": -1}', '{"/a": NaN}', '{"/a": 1e999}'])
def test_what_cannot_be_read_is_forgotten(tmp_path, text):
    file = tmp_path / "load-times.json"
    file.write_text(text)
    times = LoadTimes(file)
    assert times.expected_load_s(tmp_path / "/a") is None
    times.record(tmp_path / "b", 1.0)
    assert LoadTimes(file).expected_load_s(tmp_path / "b") == 1.0


def test_a_file_that_cannot_be_written_costs_no_more_than_a_warning(tmp_path, caplog):
    (tmp_path / "taken").write_text("no folder")
    times = LoadTimes(tmp_path / "taken" / "load-times.json")
    times.record(tmp_path / "a", 2.0)
    assert times.expected_load_s(tmp_path / "a") == 2.0
    assert "could not be written" in caplog.text


def test_the_first_prediction_after_a_start_is_that_of_the_last_loads(tmp_path):
    config = Config(
        store=StoreConfig(folder=str(tmp_path)),
        residency=ResidencyConfig(memory_bytes=1 << 31),
        models={name: TextModelConfig(path=str(BUNDLED_MODEL)) for name in ("a", "b")},
    )
    config = replace(config, engine=replace(config.engine, kv_memory_bytes=32 << 20, max_sequences=4))
    (tmp_path / "load-times.json").write_text(json.dumps({str(BUNDLED_MODEL.resolve()): 17.5}))
    models = open_local_models(config, SystemClock()).state().models
    assert {name: model.predicted_load_s for name, model in models.items()} == {"a": 17.5, "b": 17.5}


def test_only_its_owner_reads_what_is_written(tmp_path):
    file = tmp_path / "load-times.json"
    LoadTimes(file).record(tmp_path, 1.0)
    assert file.stat().st_mode & 0o777 == 0o600
