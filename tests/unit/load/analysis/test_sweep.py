"""The search for the knee, against servers whose knee is known."""

import asyncio
import math
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from maitred.core.errors import InvalidRequest
from maitred.load.analysis.sweep import MOST_TRIALS, KneeSearch, RateEvidence, Sweep, SweepTrial, sweep
from maitred.load.measure.result import LoadResult
from maitred.load.spec import ArrivalsSpec, LoadSpec, ObjectivesSpec, ShapeSpec
from tests.support.load_results import synthetic_result


def trial(rate: float, *, met: float = 1.0, growth: float = 0.0, judged: int = 1000, limit: str = "none") -> SweepTrial:
    return SweepTrial(
        rate_per_s=rate,
        objective=0.95,
        judged=judged,
        met=round(met * judged),
        due=judged // 2,
        growth=growth,
        growth_deviation=5.0,
        limit=limit,  # type: ignore[arg-type]
    )


def play(search: KneeSearch, server: Callable[[float], SweepTrial]) -> list[float]:
    rates = []
    while (rate := search.next_rate()) is not None:
        rates.append(rate)
        search.record(rate, server(rate))
        assert len(rates) <= MOST_TRIALS
    return rates


def cliff(knee: float) -> Callable[[float], SweepTrial]:
    return lambda rate: trial(rate, met=1.0 if rate <= knee else 0.3)


@pytest.mark.parametrize("knee", [0.3, 1.0, 7.3, 180.0])
def test_a_knee_is_found_within_the_tolerance(knee: float) -> None:
    search = KneeSearch(start_rate=1, lowest=0.05, highest=1000)
    rates = play(search, cliff(knee))
    assert search.reason == "found"
    assert search.passes is not None
    assert search.fails is not None
    assert search.passes <= knee < search.fails <= search.passes * 1.05
    assert len(rates) <= 2 + math.ceil(abs(math.log2(knee))) + 4


def test_a_server_that_always_passes_is_stopped_at_the_highest() -> None:
    search = KneeSearch(start_rate=1, lowest=0.1, highest=10)
    assert play(search, cliff(1e9)) == [1, 2, 4, 8, 10]
    assert (search.reason, search.passes) == ("at_highest", 10)


def test_a_server_that_always_fails_is_stopped_at_the_lowest() -> None:
    search = KneeSearch(start_rate=1, lowest=0.3, highest=10)
    assert play(search, cliff(0)) == [1, 0.5, 0.3]
    assert (search.reason, search.passes) == ("below_lowest", None)


def test_requests_that_pile_up_fail_a_rate_that_meets_its_objectives() -> None:
    assert not trial(5, growth=100).passed
    assert trial(5, growth=20).passed


def test_chance_is_distinguished_from_certainty() -> None:
    assert RateEvidence([trial(1, met=0.99)]).sure
    assert not RateEvidence([trial(1, met=0.955)]).sure
    assert RateEvidence([trial(1, met=0.5)]).sure
    assert not RateEvidence([trial(1, met=0.94, judged=100)]).sure


def test_a_close_call_at_the_knee_is_repeated() -> None:
    search = KneeSearch(start_rate=1, lowest=0.5, highest=1)
    search.record(1, trial(1, met=0.955))
    assert search.next_rate() == 1
    search.record(1, trial(1, met=0.90))
    assert search.next_rate() == 0.5
    assert search.passes is None


def test_a_failure_below_a_pass_is_repeated_before_it_is_believed() -> None:
    search = KneeSearch(start_rate=2, lowest=1, highest=4)
    search.record(4, trial(4))
    search.record(2, trial(2, met=0.94))
    asked = search.next_rate()
    assert asked == 4 or asked == 2
    search.record(2, trial(2, met=0.99))
    assert search.passes == 4
    search = KneeSearch(start_rate=2, lowest=1, highest=4)
    search.record(4, trial(4))
    assert play(search, lambda rate: trial(rate, met=1.0 if rate == 4 else 0.2)) == []
    search.record(2, trial(2, met=0.2))
    play(search, lambda rate: trial(rate, met=1.0 if rate == 4 else 0.2))
    assert search.reason == "below_lowest", "a knee that holds only sometimes is none"


def test_a_tester_at_its_limit_ends_the_search() -> None:
    search = KneeSearch(start_rate=1, lowest=0.1, highest=100)
    rates = play(
        search, lambda rate: trial(rate, met=1.0 if rate < 8 else 0.2, limit="tester" if rate >= 8 else "none")
    )
    assert rates == [1, 2, 4, 8]
    assert (search.reason, search.passes, search.fails) == ("tester", 4, None)


def simulated(rate: float, knee: float, rng: random.Random, *, seconds: float = 60.0) -> SweepTrial:
    """A single queue: waits are exponential with mean 1/(capacity - rate), and one neighbour in two is alike."""
    # 95 % wait less than the objective exactly at the knee.
    capacity = 1.25 * knee
    bound_s = -math.log(0.05) / (capacity - knee)
    judged = max(int(rng.gauss(rate * seconds, math.sqrt(rate * seconds))), 20)
    unused = capacity - rate
    share = 1 - math.exp(-unused * bound_s) if unused > 0 else 0.0
    share += rng.gauss(0, math.sqrt(max(share * (1 - share), 1e-9) * 3 / judged))
    growth = max(0.0, -unused) * seconds / 2 + rng.gauss(0, 2)
    met = min(max(share, 0.0), 1.0)
    return SweepTrial(
        rate_per_s=rate, objective=0.95, judged=judged, met=round(met * judged), due=judged // 2, growth=growth,
        growth_deviation=3.0,
    )  # fmt: skip


def test_noise_moves_the_knee_by_little_and_costs_few_trials() -> None:
    off, costs = [], []
    for seed in range(200):
        rng = random.Random(seed)
        search = KneeSearch(start_rate=1, lowest=0.05, highest=1000)
        costs.append(len(play(search, lambda rate, rng=rng: simulated(rate, 20.0, rng))))  # type: ignore[misc]
        assert search.passes is not None
        off.append(abs(math.log(search.passes / 20.0)))
    assert sorted(off)[190] < math.log(1.1)
    assert sum(costs) / len(costs) < 16


def test_the_bounds_are_checked() -> None:
    for bad in ((0, 1, 2), (3, 1, 5), (1, 9, 5)):
        with pytest.raises(InvalidRequest, match="lowest"):
            KneeSearch(lowest=bad[0], start_rate=bad[1], highest=bad[2])
    with pytest.raises(InvalidRequest, match="tolerance"):
        KneeSearch(start_rate=1, lowest=1, highest=1, tolerance=0)


def test_a_trial_is_read_from_a_result() -> None:
    result = synthetic_result(objectives=ObjectivesSpec(ttft_s=10.0), requests=400, rate_per_s=8.0)
    it = SweepTrial.of(result)
    assert (it.rate_per_s, it.judged, it.met, it.attainment) == (8.0, 400, 400, 1.0)
    assert it.passed
    assert it.requests_per_s == result.summary.requests_per_s
    assert not SweepTrial.of(synthetic_result(objectives=ObjectivesSpec(ttft_s=0.1))).passed


def test_a_sweep_plays_each_rate_anew_and_survives_its_file(tmp_path: Path) -> None:
    played: list[LoadSpec] = []

    async def play_one(spec: LoadSpec) -> LoadResult:
        played.append(spec)
        rate = spec.arrivals.rate_per_s
        assert rate is not None
        return synthetic_result(
            spec.seed, requests=200, rate_per_s=rate, ttft_s=0.1 if rate <= 3 else 1.0, objectives=spec.objectives
        )

    seen: list[SweepTrial] = []
    spec = LoadSpec(objectives=ObjectivesSpec(ttft_s=0.5), seed=7)
    found = asyncio.run(
        sweep(spec, play_one, start_rate=1, lowest=0.1, highest=100, tolerance=0.2, trial_s=30, watch=seen.append)
    )
    assert found.reason == "found"
    assert found.knee_per_s is not None
    assert found.fails_per_s is not None
    assert found.knee_per_s <= 3 < found.fails_per_s
    assert found.trials == seen
    assert len({it.seed for it in played}) == len(played)
    assert {it.bounds.duration_s for it in played} == {30}
    assert "meets the objectives" in found.verdict
    found.save(tmp_path / "sweep.json")
    assert Sweep.load(tmp_path / "sweep.json") == found


@pytest.mark.parametrize(
    "spec",
    [
        LoadSpec(arrivals=ArrivalsSpec(users=3)),
        LoadSpec(arrivals=ArrivalsSpec(profile="ramp:from=0,to=2,over=60")),
        LoadSpec(shape=ShapeSpec(trace="azure:x.csv")),
    ],
)
def test_a_load_with_a_rate_of_its_own_is_refused(spec: LoadSpec) -> None:
    async def never(spec: LoadSpec) -> LoadResult:
        raise AssertionError(spec)

    with pytest.raises(InvalidRequest, match="sets the rate itself"):
        asyncio.run(sweep(spec, never))


def test_another_file_is_not_a_sweep(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(msgspec.json.encode({"format": "maitred-load/1"}))
    with pytest.raises(InvalidRequest, match="not a sweep"):
        Sweep.load(path)
    with pytest.raises(InvalidRequest, match="Cannot read"):
        Sweep.load(tmp_path / "none.json")
