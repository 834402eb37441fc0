"""Comparison of two sides: decides whether one is faster, or whether chance made it look so.

Two runs of the same server always differ a little. For each metric, `compare` gives an interval of the change. The
intervals are so wide that *all* intervals of the table hold at once with the requested confidence. A change is
significant if its interval shows it. So a comparison of a server with itself shows no difference in 19 of 20 tables.
With separate intervals, one of fifteen rows would often be red. In a simulation, 9 of 596 such tables showed a
difference (2026-11-21, margin of 3 %, 300 to 2,000 requests; `benchmarks/load/compare_calibration.py`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from maitred.core.errors import InvalidRequest
from maitred.load.analysis.comparison import FORMAT, ComparisonRow, ComparisonSide, RunComparison, Verdict
from maitred.load.analysis.figures import METRICS, Metric, RequestFigures
from maitred.load.analysis.statistics import Weights, draw_blocks, simultaneous
from maitred.load.measure.result import LoadResult
from maitred.load.measure.times import Floats

RESAMPLES = 1000

LEAST_REQUESTS = 100
"""Least requests with a first token per run: fewer give too few blocks to tell change from chance."""

RESERVE = 1 / 3
"""Share of the error probability that is reserved for what the bootstrap misses: resamples of a few hundred requests
vary a little too little, most of all where the requests are correlated over a long time."""

ALIKE = 0.02
"""Largest difference of an outcome's share between the sides that gives no warning."""


def compare(
    before: Sequence[LoadResult],
    after: Sequence[LoadResult],
    *,
    margin: float = 0.03,
    confidence: float = 0.95,
    seed: int = 0,
) -> RunComparison:
    """Compares the runs of two sides.

    Within a run, neighbouring requests are resampled together, each with all its gaps (see `statistics`). If both sides
    played the same requests, each request is drawn together with its counterpart on the other side. The variation of
    the workload then cancels. With three runs or more the differences between runs of one side count instead wherever
    they are larger: they hold what a single run cannot show, such as a machine that drifts.

    Args:
        before: Results of the first side, at least one.
        after: Results of the second side, at least one.
        margin: Largest change that counts as no difference.
        confidence: Probability that all intervals hold at once.
        seed: Seed of the resampling; the same results and seed give the same table.

    Raises:
        InvalidRequest: There are too few requests, or `margin` or `confidence` make no sense.
    """
    if not before or not after:
        raise InvalidRequest("A comparison needs at least one result on each side. Name both files.")
    if not 0 <= margin < 1:
        raise InvalidRequest("The margin must be at least 0 and below 1, such as 0.03 for 3 %.")
    if not 0.5 <= confidence < 1:
        raise InvalidRequest("The confidence must be at least 0.5 and below 1, such as 0.95.")
    sides = [[RequestFigures(result) for result in side] for side in (before, after)]
    _check_enough(sides)
    paired = _are_paired(before, after, sides)
    change, error, critical = _changes(sides, paired=paired, confidence=confidence, seed=seed)
    rows = [
        _row(metric, number, sides, change[number], critical * error[number], margin)
        for number, metric in enumerate(METRICS)
        if not all(np.isnan(run.reported[number]) for side in sides for run in side)
    ]
    differences = list(_differences(before[0].spec, after[0].spec))
    runs = (len(before), len(after))
    return RunComparison(
        format=FORMAT,
        before=_side(before, sides[0]),
        after=_side(after, sides[1]),
        margin=margin,
        confidence=confidence,
        seed=seed,
        paired=paired,
        block_requests=max(run.block for side in sides for run in side),
        method=_method(paired, confidence, _run_freedom(sides)),
        rows=rows,
        caveat=_caveat(runs),
        warnings=list(_warnings(before, after, differences)),
        differences=differences,
        verdict=_verdict(rows),
    )


def _changes(
    sides: list[list[RequestFigures]], *, paired: bool, confidence: float, seed: int
) -> tuple[Floats, Floats, float]:
    """Returns each metric's change, its standard error (NaN: unknown), and the errors to reach."""
    rng = np.random.default_rng(seed)
    weights: list[list[Weights]] = []
    for number, side in enumerate(sides):
        drawn = []
        for place, run in enumerate(side):
            if paired and number:
                drawn.append(weights[0][place])
            else:
                block = max(run.block, sides[1][place].block) if paired else run.block
                drawn.append(draw_blocks(len(run), block, RESAMPLES, rng))
        weights.append(drawn)
    levels, deviations = [], []
    for side, drawn in zip(sides, weights, strict=True):
        levels.append(np.stack([_scale(run.reported[:, None])[:, 0] for run in side]))
        deviations.append(
            sum(
                # Blocks vary about the mean of the run instead of the mean of the server. This makes the variance too
                # small by the share of the run that one block is.
                (_scale(run.under(weight)) - _scale(run.under(np.ones((1, len(run)), dtype=np.float32))))
                / np.sqrt(1 - run.block / len(run))
                for run, weight in zip(side, drawn, strict=True)
            )
            / len(side)
        )
    change: Floats = levels[1].mean(axis=0) - levels[0].mean(axis=0)
    moved: Floats = np.asarray(deviations[1] - deviations[0])
    within = moved.std(axis=1)
    chance = np.sqrt(sum(sum(run.chance**2 for run in side) / len(side) ** 2 for side in sides))
    # Pooled variance between the runs of one side: if nothing has changed, both sides vary alike.
    runs = _run_freedom(sides)
    between = np.zeros(len(METRICS))
    if runs >= 2:
        squares = sum(((level - level.mean(axis=0)) ** 2).sum(axis=0) for level in levels)
        between = np.sqrt(squares / runs * (1 / len(sides[0]) + 1 / len(sides[1])))
    # Number of blocks of the side that has fewer. Paired requests share their blocks; without pairs, the block lengths
    # of both sides have the same kind of error. This is the textbook's lower bound for the difference of two means.
    blocks = min(sum(len(run) / run.block - 1 for run in side) for side in sides)
    freedom = np.full(len(METRICS), max(blocks, 3.0) if runs < 2 else float(runs))
    error = np.maximum(np.maximum(within, chance), between)
    lacking = np.array([any(run.lacks(metric) for side in sides for run in side) for metric in METRICS])
    judged = ~lacking & np.isfinite(change) & np.isfinite(within)
    error[~judged] = np.nan
    varies = judged & (within > 1e-9)
    if varies.any():
        standard, freedom = (moved[varies] / within[varies, None]).T, freedom[varies]
    else:  # The two sides are identical in every digit: only the chance that shares may hide remains.
        standard, freedom = rng.standard_normal((RESAMPLES, 1)), freedom[:1]
    return change, error, simultaneous(standard, freedom, confidence=1 - (1 - RESERVE) * (1 - confidence), rng=rng)


def _scale(values: Floats) -> Floats:
    """Takes logarithms of all metrics but shares, so that a change is a ratio. Shape (metrics, any)."""
    is_ratio = np.array([metric.scale == "ratio" for metric in METRICS])[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled: Floats = np.where(is_ratio, np.log(values), values)
    scaled[~np.isfinite(scaled)] = np.nan
    return scaled


def _row(
    metric: Metric, number: int, sides: list[list[RequestFigures]], change: float, reach: float, margin: float
) -> ComparisonRow:
    def back(value: float) -> float | None:
        if not np.isfinite(value):
            return None
        return round(float(np.exp(value)) if metric.scale == "ratio" else float(value), 6)

    levels = [_scale(np.stack([run.reported for run in side], axis=1))[number].mean() for side in sides]
    low, high = back(change - reach), back(change + reach)
    note = ""
    if low is None:
        needed = max(run.lacks(metric) for side in sides for run in side)
        note = f"needs {needed} requests with this time in each run" if needed else "a side has no such value"
    margin *= metric.margin
    return ComparisonRow(
        metric=metric.name,
        label=metric.label,
        unit=metric.unit,
        lower_is_better=metric.lower_is_better,
        scale=metric.scale,
        before=back(levels[0]),
        after=back(levels[1]),
        change=back(change),
        low=low,
        high=high,
        margin=round(margin, 6),
        verdict=_judge(metric, change, reach, float(np.log1p(margin)) if metric.scale == "ratio" else margin),
        note=note,
    )


def _judge(metric: Metric, change: float, reach: float, margin: float) -> Verdict:
    if not np.isfinite(reach):
        return "unclear"
    if abs(change) + reach <= margin:
        return "same"
    if abs(change) > max(reach, margin):
        return "worse" if (change > 0) == metric.lower_is_better else "better"
    return "unclear"


def _check_enough(sides: list[list[RequestFigures]]) -> None:
    for name, side in zip(("before", "after"), sides, strict=True):
        for number, run in enumerate(side, 1):
            answered = int(np.isfinite(run.ttft_s).sum()) or int(np.isfinite(run.reported[8]) * len(run))
            if answered < LEAST_REQUESTS:
                which = f"Run {number} of the side" if len(side) > 1 else "The side"
                raise InvalidRequest(
                    f"{which} “{name}” has {answered} answered requests after its warm-up; a comparison needs at least "
                    f"{LEAST_REQUESTS}, and {100 * 10} for p99. Run longer, or with a higher rate."
                )


def _are_paired(before: Sequence[LoadResult], after: Sequence[LoadResult], sides: list[list[RequestFigures]]) -> bool:
    """Returns whether each run has a counterpart with the same requests and settings, but for the target."""
    return len(before) == len(after) and all(
        not any(not path.startswith("target.") for path in map(_path, _differences(old.spec, new.spec)))
        and np.array_equal(mine.keys, other.keys)
        for old, new, mine, other in zip(before, after, *sides, strict=True)
    )


def _run_freedom(sides: list[list[RequestFigures]]) -> int:
    return len(sides[0]) + len(sides[1]) - 2


def _path(difference: str) -> str:
    return difference.partition(":")[0]


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Returns the settings that differ, with both values."""
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{path}{key}.")
        elif old != new:
            yield f"{path}{key}: {old} → {new}"


def _side(results: Sequence[LoadResult], figures: list[RequestFigures]) -> ComparisonSide:
    return ComparisonSide(
        runs=len(results),
        requests=sum(map(len, figures)),
        started=results[0].started,
        target=f"{results[0].target.url} {results[0].target.model}".strip(),
        workload=results[0].workload,
        outcomes=dict(_outcomes(results)),
    )


def _outcomes(results: Sequence[LoadResult]) -> Counter[str]:
    total: Counter[str] = Counter()
    for result in results:
        total.update(result.summary.outcomes)
    return total


def _warnings(before: Sequence[LoadResult], after: Sequence[LoadResult], differences: list[str]) -> Iterator[str]:
    changed = [it for it in differences if not it.startswith("target.") and _path(it) != "seed"]
    if changed:
        yield f"The two sides did not play the same load: {'; '.join(changed)}."
    for name, side in (("before", before), ("after", after)):
        if any(list(_differences(side[0].spec, result.spec)) for result in side[1:]):
            yield f"The runs of “{name}” have different settings among themselves."
        for result in side:
            if result.tester.limit != "none":
                yield f"In a run of “{name}” the figures are not the server's alone. {result.tester.verdict}"
    counts = [_outcomes(side) for side in (before, after)]
    for outcome in sorted({*counts[0], *counts[1]}):
        shares = [count[outcome] / max(count.total(), 1) for count in counts]
        if abs(shares[1] - shares[0]) > ALIKE:
            yield (
                f"{shares[0]:.1%} of the requests ended as {outcome} before and {shares[1]:.1%} after; latencies are "
                "of those that were answered."
            )


def _caveat(runs: tuple[int, int]) -> str:
    if sum(runs) >= 4:
        return ""
    return (
        "With so few runs on each side, what differs between runs of the same thing, such as a machine that drifts, "
        "is not in the intervals. Three runs of each, in turns, would show it."
    )


def _method(paired: bool, confidence: float, runs: int) -> str:
    pairing = "each request drawn together with its twin on the other side" if paired else "each side by itself"
    spread = f", widened to the spread between runs ({runs} degrees of freedom)" if runs >= 2 else ""
    return (
        f"Circular block bootstrap over requests in order of time ({RESAMPLES} resamples, {pairing}){spread}; "
        f"intervals by max-t hold for all rows at once with {confidence:.0%} confidence."
    )


def _verdict(rows: list[ComparisonRow]) -> str:
    def words(verdict: Verdict) -> str:
        return ", ".join(
            f"{row.label} ({row.change - 1:+.1%})"
            if row.scale == "ratio"
            else f"{row.label} ({row.change:+.1%} points)"
            for row in rows
            if row.verdict == verdict and row.change is not None
        )

    worse, better = words("worse"), words("better")
    unclear = [row.label for row in rows if row.verdict == "unclear"]
    if worse or better:
        parts = [f"{name}: {text}" for name, text in (("Worse", worse), ("Better", better)) if text]
        return "; ".join(parts) + "."
    if not unclear:
        return "The same, within the margin, in every metric."
    return (
        f"No difference found. Whether it is within the margin is open for {', '.join(unclear)}: more requests or more "
        "runs would tell."
    )
