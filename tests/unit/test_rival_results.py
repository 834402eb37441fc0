"""A comparison with rivals that is made in parts."""

import json
from pathlib import Path

import pytest

from benchmarks.support import report
from benchmarks.support.report import Report
from benchmarks.support.rivals import rival_results
from benchmarks.support.rivals.rival_results import Results, kept_figures

SHAPE = {"requests": 32, "prompt_tokens": 128, "shared_tokens": 0, "output_tokens": 64}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(rival_results, "RESULTS", tmp_path)


def part() -> tuple[Report, Results]:
    made = Report("rivals", seed=1, quick=False)
    return made, Results(made, kept_figures("rivals"))


def test_a_part_keeps_what_others_found(tmp_path: Path) -> None:
    _, first = part()
    first.note("many", "int8", SHAPE, "vllm", [200.0], [100.0])
    first.finish()
    _, second = part()
    second.note("many", "int8", SHAPE, "openvino", [180.0], [120.0])
    second.note("one", "fp32", SHAPE, "vllm", [12.0], [8.0])
    second.finish()
    kept = json.loads((tmp_path / "rivals.json").read_text())["figures"]["workloads"]
    assert {key: set(entry["rivals"]) for key, entry in kept.items()} == {
        "many int8": {"vllm", "openvino"},
        "one fp32": {"vllm"},
    }
    assert kept["many int8"]["rivals"]["vllm"]["ours_over"] == [2.0]


def test_bars_are_held_against_all_parts() -> None:
    _, first = part()
    first.note("many", "int8", SHAPE, "vllm", [90.0], [100.0])
    assert first.finish() == 1
    later, second = part()
    second.note("many", "int8", SHAPE, "openvino", [200.0], [100.0])
    assert second.finish() == 1, "the best of all counts, not of this part"
    assert [bar.measured for bar in later.bars] == [0.9]
    _, third = part()
    third.note("many", "int8", SHAPE, "vllm", [110.0, 90.0, 130.0], [100.0] * 3)
    assert third.finish() == 0, "measured again, its median counts"


def test_a_shared_prefix_has_a_bar_of_its_own() -> None:
    made, results = part()
    results.note("shared", "fp32", {**SHAPE, "shared_tokens": 512}, "vllm", [14.0], [10.0])
    assert results.finish() == 1
    assert {bar.bound: bar.met for bar in made.bars} == {1.5: False, 1.2: True}


def test_a_failure_is_reported_until_it_is_mended() -> None:
    made, results = part()
    results.failed("vllm", "int8", "start", "no memory")
    results.failed("vllm", "int8", "many", "took too long")
    results.ready("vllm", "int8", "in process")
    assert made.figures["failed"] == {"vllm int8 many": "took too long"}
    results.note("many", "int8", SHAPE, "vllm", [1.0], [1.0])
    assert made.figures["failed"] == {}


def test_what_another_processor_measured_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(rival_results, "RESULTS", tmp_path)
    (tmp_path / "rivals.json").write_text(json.dumps({"machine": {"cpu": "another"}, "figures": {"how": {"vllm": {}}}}))
    assert kept_figures("rivals") == {}
