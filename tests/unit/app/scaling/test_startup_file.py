"""Start-up times outlive the gateway."""

import json

from maitred.app.scaling.startup_file import StoredStartupTimes
from maitred.scaling.startup_times import StartKind


def test_times_are_those_of_the_run_before(tmp_path):
    times = StoredStartupTimes(tmp_path / "data" / "times.json", "chat", {})
    for seconds in (3.0, 5.0):
        times.observe(StartKind.WEIGHTS_CACHED, seconds)
    again = StoredStartupTimes(tmp_path / "data" / "times.json", "chat", {})
    assert again.count(StartKind.WEIGHTS_CACHED) == 2
    assert again.quantile(StartKind.WEIGHTS_CACHED, 0.9) == 5.0


def test_only_the_last_ones_are_kept(tmp_path):
    times = StoredStartupTimes(tmp_path / "times.json", "chat", {})
    for seconds in range(1, 100):
        times.observe(StartKind.ASLEEP, float(seconds))
    assert len(json.loads((tmp_path / "times.json").read_text())["chat"]["asleep"]) == 32
    assert StoredStartupTimes(tmp_path / "times.json", "chat", {}).quantile(StartKind.ASLEEP, 0.0) == 68.0


def test_what_cannot_be_read_is_forgotten(tmp_path):
    for text in ("{", "[]", '{"chat": 3}', '{"chat": {"cold": 3, "soon": [1], "asleep": [-1, "x", 2.5]}}'):
        (tmp_path / "times.json").write_text(text)
        times = StoredStartupTimes(tmp_path / "times.json", "chat", {StartKind.COLD: 7.0})
        assert times.quantile(StartKind.COLD, 0.9) == 7.0
    assert times.count(StartKind.ASLEEP) == 1


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    times = StoredStartupTimes(tmp_path / "file" / "times.json", "chat", {})
    times.observe(StartKind.COLD, 2.0)
    assert times.quantile(StartKind.COLD, 0.5) == 2.0
    assert "could not be written" in caplog.text


def test_another_model_has_its_own_times(tmp_path):
    file = tmp_path / "times.json"
    large = StoredStartupTimes(file, "/models/large", {})
    large.observe(StartKind.COLD, 300.0)
    small = StoredStartupTimes(file, "/models/small", {StartKind.COLD: 5.0})
    assert (small.count(StartKind.COLD), small.quantile(StartKind.COLD, 0.9)) == (0, 5.0)
    small.observe(StartKind.COLD, 7.0)
    assert StoredStartupTimes(file, "/models/large", {}).quantile(StartKind.COLD, 0.9) == 300.0
    assert StoredStartupTimes(file, "/models/small", {}).quantile(StartKind.COLD, 0.9) == 7.0
