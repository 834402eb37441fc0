"""Resampling, against its definition done slowly."""

import numpy as np
import pytest

from maitred.load.analysis.statistics import BinnedGaps, SortedValues, block_length, draw_blocks, simultaneous


def remembering(n: int, memory: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = [0.0]
    for step in rng.standard_normal(n - 1):
        values.append(memory * values[-1] + float(step))
    return np.array(values)


def test_blocks_grow_with_memory() -> None:
    lengths = [np.mean([block_length(remembering(1000, memory, s)) for s in range(20)]) for memory in (0, 0.5, 0.9)]
    assert lengths[0] < 6
    assert lengths[0] < lengths[1] < lengths[2]
    # Politis and White give (2 G²/D)^(1/3) n^(1/3) with G²/D = 3/4 (2ρ/(1-ρ²))² for a first-order process: 11.4 here.
    assert 6 < lengths[1] < 20


@pytest.mark.parametrize("series", [np.ones(50), np.arange(3.0), np.zeros(1)])
def test_a_series_that_says_nothing_has_single_blocks(series: np.ndarray) -> None:
    assert block_length(series) == 1


@pytest.mark.parametrize("block", [1, 7, 100])
def test_a_resample_is_as_long_as_the_run_and_fair(block: int) -> None:
    weights = draw_blocks(100, block, 4000, np.random.default_rng(1))
    assert (weights.sum(axis=1) == 100).all()
    assert (weights >= 0).all()
    # Each column is a mean of 4,000 draws with variance of about 1.
    assert np.abs(weights.mean(axis=0) - 1).max() < 5 / 4000**0.5


def test_blocks_keep_neighbours_together() -> None:
    weights = draw_blocks(1000, 50, 200, np.random.default_rng(2))
    # Only at the ends of its 20 blocks may the count change.
    assert (np.diff(weights, axis=1) != 0).sum(axis=1).max() <= 40


def test_weighted_quantiles_are_those_of_repeated_values() -> None:
    rng = np.random.default_rng(3)
    values = rng.lognormal(size=200)
    values[::17] = np.nan
    weights = draw_blocks(200, 9, 20, rng)
    ours = SortedValues(values).quantiles(weights, (0.5, 0.95, 0.99))
    means = SortedValues(values).mean(weights)
    for row, weight in enumerate(weights):
        repeated = np.repeat(values, weight.astype(int))
        repeated = repeated[~np.isnan(repeated)]
        np.testing.assert_allclose(ours[:, row], np.quantile(repeated, (0.5, 0.95, 0.99)))
        assert means[row] == pytest.approx(repeated.mean())


def test_binned_quantiles_are_close_to_those_of_repeated_gaps() -> None:
    rng = np.random.default_rng(4)
    request = np.repeat(np.arange(300), rng.integers(0, 60, 300))
    gaps = rng.lognormal(-3.5, 0.4, len(request))
    weights = draw_blocks(300, 5, 20, rng)
    ours = BinnedGaps(gaps, request, 300).quantiles(weights, (0.5, 0.95, 0.99))
    for row, weight in enumerate(weights):
        repeated = np.repeat(gaps, weight.astype(int)[request])
        np.testing.assert_allclose(ours[:, row], np.quantile(repeated, (0.5, 0.95, 0.99)), rtol=0.005)


def test_no_gaps_have_no_quantiles() -> None:
    nothing = BinnedGaps(np.empty(0), np.empty(0, dtype=np.int64), 5)
    assert np.isnan(nothing.quantiles(np.ones((2, 5), dtype=np.float32), (0.5,))).all()


def test_the_bootstrap_knows_what_memory_does_to_a_mean() -> None:
    errors = []
    for seed in range(20):
        series = remembering(2000, 0.7, seed)
        block = block_length(series)
        weights = draw_blocks(2000, block, 400, np.random.default_rng(seed))
        errors.append(float((weights @ series / 2000).std()))
    # The truth: 1/(1-ρ)/√n. Single requests instead of blocks would give 0.031.
    assert np.mean(errors) == pytest.approx(1 / 0.3 / 2000**0.5, rel=0.15)


def test_more_metrics_and_less_freedom_reach_further() -> None:
    rng = np.random.default_rng(5)
    normal = rng.standard_normal((20000, 10))

    def reach(metrics: int, freedom: float) -> float:
        return simultaneous(normal[:, :metrics], np.full(metrics, freedom), confidence=0.95, rng=rng)

    assert reach(1, 1e6) == pytest.approx(1.96, abs=0.05)
    assert reach(1, 4) == pytest.approx(2.776, abs=0.12)
    assert reach(10, 1e6) == pytest.approx(2.80, abs=0.06)
    twins = np.repeat(normal[:, :1], 10, axis=1)
    assert simultaneous(twins, np.full(10, 1e6), confidence=0.95, rng=rng) == pytest.approx(1.96, abs=0.05)
