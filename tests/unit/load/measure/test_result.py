"""The result file: what goes in comes out, and other files are refused."""

import json
import math
from array import array
from pathlib import Path

import msgspec
import numpy as np
import pytest

from maitred.core.errors import InvalidRequest
from maitred.core.secret import Secret
from maitred.load.measure.record import LoadTesterSample, RequestRecord, RunData, UserOutcome
from maitred.load.measure.result import LoadResult
from maitred.load.spec import LoadSpec, LoadTarget, LoadTenant, ObjectivesSpec, StopCondition
from tests.support.load_results import synthetic_result


def test_a_file_comes_back_as_it_went(tmp_path: Path) -> None:
    result = synthetic_result(1, requests=80, failures=True, tenants=("chat", "batch"), warmup_s=2)
    path = tmp_path / "new folder" / "run.json"
    result.save(path)
    loaded = LoadResult.load(path)
    assert loaded == result
    for mine, theirs in (
        (result.ttft_s(), loaded.ttft_s()),
        (result.e2e_s(), loaded.e2e_s()),
        (result.tpot_s(), loaded.tpot_s()),
        (result.itl_s()[0], loaded.itl_s()[0]),
        (result.met_flags(), loaded.met_flags()),
    ):
        np.testing.assert_array_equal(mine, theirs)
    assert [file.name for file in path.parent.iterdir()] == ["run.json"]


def test_the_file_has_no_nan(tmp_path: Path) -> None:
    synthetic_result(2, requests=40, failures=True, stream=False).save(tmp_path / "run.json")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    content = json.loads((tmp_path / "run.json").read_text(), parse_constant=refuse)
    assert content["requests"]["first_s"] == [None] * 40
    assert content["summary"]["ttft"]["p50"] is None


def test_columns_and_the_counted() -> None:
    result = synthetic_result(3, requests=50, warmup_s=2)
    due_s = result.column("intended_s")
    assert result.counted_flags().tolist() == (due_s >= 2).tolist()
    assert result.summary.requests == int((due_s >= 2).sum()) < 50
    assert result.column("tenant").tolist() == ["default"] * 50
    assert result.column("pieces").dtype == np.int64
    values, request = result.itl_s()
    assert len(values) == len(request) == int((result.column("pieces") - 1).sum())


def test_secrets_are_named_and_not_disclosed(tmp_path: Path) -> None:
    key = Secret("s3cr3t", "{env: KEY}")
    spec = LoadSpec(target=LoadTarget(api_key=key), tenants={"a": LoadTenant(api_key=key)})
    result = LoadResult.of(spec, RunData([], [], 0.0, 0.0), command="maitred load run", workload="none")
    result.save(tmp_path / "run.json")
    assert result.spec["target"]["api_key"] == result.spec["tenants"]["a"]["api_key"] == "{env: KEY}"
    assert "s3cr3t" not in (tmp_path / "run.json").read_text()


def test_tenants_are_summarised_alone() -> None:
    result = synthetic_result(4, requests=60, tenants=("b", "a"))
    assert list(result.tenants) == ["a", "b"]
    assert sum(summary.requests for summary in result.tenants.values()) == 60
    tokens_per_s = sum(summary.output_tokens_per_s for summary in result.tenants.values())
    assert tokens_per_s == pytest.approx(result.summary.output_tokens_per_s, abs=1e-5)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[]", "not a result of `maitred load run`"),
        ("not json", "not a result of `maitred load run`"),
        ('{"format": "maitred-sweep/1"}', "not a result of `maitred load run`"),
        ('{"format": "maitred-load/2"}', "reads maitred-load/1"),
        ('{"format": "maitred-load/1"}', "damaged"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=reason):
        LoadResult.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"none\.json: No such file"):
        LoadResult.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (("gaps",), "AAAA", "gaps"),
        (("gaps",), "*", "gaps"),
        (("requests", "turn"), [], "different lengths"),
        (("requests", "pieces"), [1] * 10, "do not fit"),
    ],
)
def test_damage_is_found(tmp_path: Path, field: tuple[str, ...], value: object, reason: str) -> None:
    content = msgspec.to_builtins(synthetic_result(5, requests=10))
    place = content
    for key in field[:-1]:
        place = place[key]
    place[field[-1]] = value
    path = tmp_path / "run.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidRequest, match=reason):
        LoadResult.load(path)


def test_the_series_of_a_known_run() -> None:
    first = RequestRecord(session=0, turn=0, tenant="a", intended_s=0.25, asked_tokens=4, sent_s=0.5, ended_s=2.5)
    first.arrivals_s, first.output_tokens, first.outcome = array("d", [1.0, 1.5, 2.5]), 6, UserOutcome.COMPLETE
    second = RequestRecord(
        session=1, turn=0, tenant="a", intended_s=1.5, asked_tokens=4, ended_s=3.0, outcome=UserOutcome.FAILED
    )
    data = RunData(
        [first, second],
        [LoadTesterSample(1.0, 0.5, 0.0, 0.01, 1, 1), LoadTesterSample(2.0, 0.25, 0.0, 0.0, 1, 1)],
        3.0,
        0.0,
    )
    spec = LoadSpec(bounds=StopCondition(duration_s=3), objectives=ObjectivesSpec(ttft_s=1))
    series = LoadResult.of(spec, data, command="", workload="").series
    assert series.step_s == 1
    assert series.due == [1, 1, 0]
    assert series.sent == [1, 0, 0]
    assert series.ended == {"complete": [0, 0, 1], "failed": [0, 0, 1]}
    assert series.open == [1, 2, 0]
    assert series.output_tokens_per_s == [0, 4, 2]
    assert series.ttft_p50_s == [0.75, None, None]
    assert series.itl_p50_s == [None, 0.5, 1.0]
    assert series.goodput_per_s == [0, 0, 1]
    assert series.cpu_share == [0.5, 0.25, None]


def test_a_long_run_has_no_more_steps_than_a_page_shows() -> None:
    record = RequestRecord(session=0, turn=0, tenant="a", intended_s=0, asked_tokens=1, ended_s=3601.0)
    series = LoadResult.of(LoadSpec(), RunData([record], [], 3601.0, 0.0), command="", workload="").series
    assert series.step_s == 7
    assert len(series.due) == 515 == len(series.cpu_share) == len(series.ttft_p50_s)


def test_a_record_that_never_left_survives(tmp_path: Path) -> None:
    record = RequestRecord(session=0, turn=0, tenant="a", intended_s=0.5, asked_tokens=4)
    assert math.isnan(record.ended_s)
    result = LoadResult.of(LoadSpec(), RunData([record], [], 1.0, 0.0), command="", workload="")
    result.save(tmp_path / "run.json")
    loaded = LoadResult.load(tmp_path / "run.json")
    assert loaded.requests.ended_s == [None]
    assert loaded.summary.outcomes == {"unfinished": 1}
    assert loaded.summary.attainment == 0
