"""Which differences are called, which are not, and how they are reported."""

import msgspec
import numpy as np
import pytest

from maitred.core.errors import InvalidRequest
from maitred.load.analysis.compare import compare
from maitred.load.analysis.comparison import ComparisonRow, RunComparison
from maitred.load.analysis.statistics import simultaneous
from maitred.load.measure.result import LoadResult
from maitred.load.spec import ObjectivesSpec
from tests.support.load_results import synthetic_result

OBJECTIVES = ObjectivesSpec(ttft_s=0.8, tpot_s=0.05)


def run(seed: int = 0, **changes: object) -> LoadResult:
    return synthetic_result(seed, **{"output_tokens": 20, "objectives": OBJECTIVES, **changes})  # type: ignore[arg-type]


def row(table: RunComparison, metric: str) -> ComparisonRow:
    return next(it for it in table.rows if it.metric == metric)


def relabelled(result: LoadResult, **settings: object) -> LoadResult:
    """The same measurements under another spec."""
    spec = {**result.spec, **settings}
    return msgspec.structs.replace(result, spec=spec)


def test_a_run_is_the_same_as_itself() -> None:
    table = compare([run()], [run()])
    assert table.paired
    assert {it.verdict for it in table.rows if it.low is not None and it.metric != "failed"} == {"same"}
    assert row(table, "ttft_p50").change == 1


def test_two_runs_of_one_thing_show_no_difference() -> None:
    table = compare([run(1)], [run(2)])
    assert not table.worse
    assert not table.better
    assert table.verdict.startswith("No difference found")


def test_a_slower_first_token_is_found_and_nothing_else() -> None:
    slower = run(requests=1200, ttft_s=0.48)
    table = compare([run(requests=1200)], [slower])
    ttft = row(table, "ttft_p50")
    assert ttft.verdict == "worse"
    assert ttft.low is not None
    assert ttft.high is not None
    assert ttft.change is not None
    assert 1 < ttft.low < ttft.change < ttft.high
    assert ttft.change == pytest.approx(1.2, abs=0.05)
    assert row(table, "itl_p50").verdict == "same"
    assert "TTFT p50 (+2" in table.verdict


def test_direction_turns_the_verdict() -> None:
    table = compare([run(requests=1200, ttft_s=0.48)], [run(requests=1200)])
    assert row(table, "ttft_p50").verdict == "better"


def test_a_real_change_within_the_margin_is_no_news() -> None:
    table = compare([run(requests=1200)], [run(requests=1200, ttft_s=0.48)], margin=0.5)
    assert row(table, "ttft_p50").verdict == "same"


def test_the_same_seed_gives_the_same_table() -> None:
    sides = [run(1)], [run(2)]
    assert compare(*sides, seed=3) == compare(*sides, seed=3)


def test_runs_that_drift_widen_the_interval() -> None:
    def levels(first: int) -> list[LoadResult]:
        return [run(first + n, ttft_s=0.4 * factor) for n, factor in enumerate((0.85, 1.0, 1.15))]

    drifting = compare(levels(10), levels(20))
    steady = compare([run(n) for n in (10, 11, 12)], [run(n) for n in (20, 21, 22)])
    wide, narrow = row(drifting, "ttft_p50"), row(steady, "ttft_p50")
    assert wide.high / wide.low > 1.3 * narrow.high / narrow.low  # type: ignore[operator]
    assert not drifting.caveat
    assert "degrees of freedom" in drifting.method


def test_one_run_of_each_says_what_it_cannot_know() -> None:
    assert "drifts" in compare([run()], [run()]).caveat


def test_no_failure_seen_is_not_no_failure_ever() -> None:
    failed = row(compare([run()], [run()]), "failed")
    assert failed.change == 0
    assert failed.high is not None
    assert failed.high > 0.003


def test_too_few_requests_are_refused_with_a_number() -> None:
    with pytest.raises(InvalidRequest, match=r"“after” has 60 answered requests.*at least 100"):
        compare([run()], [run(requests=60)])


def test_a_tail_is_not_judged_from_a_handful() -> None:
    p99 = row(compare([run()], [run()]), "ttft_p99")
    assert (p99.low, p99.verdict) == (None, "unclear")
    assert "1000 requests" in p99.note


def test_without_objectives_the_report_has_no_line_about_them() -> None:
    plain = run(objectives=ObjectivesSpec())
    metrics = {it.metric for it in compare([plain], [plain]).rows}
    assert not metrics & {"goodput_per_s", "attainment"}


def test_answers_that_were_not_streamed_are_compared_by_their_end() -> None:
    whole = run(stream=False)
    table = compare([whole], [whole])
    assert "ttft_p50" not in {it.metric for it in table.rows}
    assert row(table, "e2e_p50").verdict == "same"


def test_settings_that_differ_are_named() -> None:
    table = compare([run()], [run(rate_per_s=9.0)])
    assert "arrivals.rate_per_s: 8.0 → 9.0" in table.differences
    assert any("did not play the same load" in warning for warning in table.warnings)
    assert not table.paired


def test_another_target_is_what_a_comparison_is_for() -> None:
    first = run()
    other = relabelled(first, target={**first.spec["target"], "url": "http://127.0.0.1:9000"})
    table = compare([first], [other])
    assert table.paired
    assert not table.warnings


def test_a_tester_at_its_limit_is_reported() -> None:
    late = run()
    cost = msgspec.structs.replace(late.tester, limit="tester", verdict="Its core was full.")
    table = compare([msgspec.structs.replace(late, tester=cost)], [run()])
    assert any("“before”" in warning and "Its core was full." in warning for warning in table.warnings)


def test_other_endings_are_reported() -> None:
    table = compare([run()], [run(failures=True)])
    assert any("ended as complete" in warning for warning in table.warnings)


@pytest.mark.parametrize(
    "bad", [{"margin": -0.1}, {"margin": 1.0}, {"confidence": 0.3}, {"confidence": 1.0}], ids=lambda bad: str(bad)
)
def test_senseless_arguments_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest):
        compare([run()], [run()], margin=bad.get("margin", 0.03), confidence=bad.get("confidence", 0.95))


def test_nothing_is_not_a_side() -> None:
    with pytest.raises(InvalidRequest, match="at least one result"):
        compare([], [run()])


def test_the_table_is_json() -> None:
    table = compare([run(1)], [run(2)])
    assert msgspec.json.decode(msgspec.json.encode(table), type=RunComparison) == table


def test_the_bootstrap_is_not_trusted_to_the_last_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float]] = []

    def reach(deviations: np.ndarray, freedom: np.ndarray, *, confidence: float, rng: np.random.Generator) -> float:
        asked.append((confidence, float(freedom.max())))
        return simultaneous(deviations, freedom, confidence=confidence, rng=rng)

    monkeypatch.setattr("maitred.load.analysis.compare.simultaneous", reach)
    unpaired, twins = compare([run(1)], [run(2)]), compare([run(1)], [run(1, ttft_s=0.48)])
    assert twins.paired
    assert not unpaired.paired
    for table, (confidence, freedom) in zip((unpaired, twins), asked, strict=True):
        assert 0.96 < confidence < 0.97
        # The blocks of the side that has fewer, not of both together: of twins, the second side's are the first's.
        assert freedom == pytest.approx(400 / table.block_requests - 1)
