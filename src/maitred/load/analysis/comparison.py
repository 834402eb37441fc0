"""Comparison of two sides, row by row."""

from pathlib import Path
from typing import Literal

import msgspec

from maitred.core.errors import InvalidRequest

FORMAT = "maitred-comparison/1"

Verdict = Literal["same", "better", "worse", "unclear"]
"""Verdict on one metric: ``same`` if the interval lies within the margin, ``better`` or ``worse`` if the change is real
and larger than the margin, ``unclear`` if there are too few requests to say."""


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of both sides.

    Attributes:
        metric: Such as ``ttft_p50`` or ``output_tokens_per_s``.
        label: Name of the metric for people.
        unit: ``s``, ``1/s`` or ``share``.
        lower_is_better: Whether a lower value is better.
        scale: Whether the change is a ratio (after over before) or, for shares, a difference.
        before, after: Geometric mean over the runs of the side (for shares: arithmetic mean). None: no run has the
            metric.
        change: After over before, or after minus before, as `scale` says. None: it cannot be computed.
        low, high: Interval of `change` that holds for all rows at once with the comparison's confidence. None: there
            are too few requests.
        margin: Largest change that counts as no difference, in the scale of `change`; 0.03 means 3 % or 3 points.
        verdict: See `Verdict`.
        note: Reason why there is no interval; empty: there is one.
    """

    metric: str
    label: str
    unit: str
    lower_is_better: bool
    scale: Literal["ratio", "difference"]
    before: float | None
    after: float | None
    change: float | None
    low: float | None
    high: float | None
    margin: float
    verdict: Verdict
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ratio of after over before; None for shares."""
        return self.change if self.scale == "ratio" else None


class ComparisonSide(msgspec.Struct, frozen=True, kw_only=True):
    """Side of a comparison.

    Attributes:
        runs: Number of runs.
        requests: Number of counted requests of all runs.
        started: Start of the first run, in UTC.
        target: Address and model.
        workload: Description of the workload in one line.
        outcomes: Outcome -> number of counted requests that ended so.
    """

    runs: int
    requests: int
    started: str
    target: str
    workload: str
    outcomes: dict[str, int]


class RunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two sides, and which of the differences between them are real.

    Attributes:
        format: `FORMAT`.
        before, after: The two sides that are compared.
        margin, confidence, seed: Settings of the comparison, as they were requested.
        paired: Whether both sides played the same requests, so that each request was compared with its counterpart.
        block_requests: Number of neighbouring requests that were resampled together (largest over the runs).
        method: Statistical method in one sentence, for the footnote of the report.
        rows: One per metric.
        caveat: Effects that the intervals do not include; empty: none is known.
        warnings: Reasons why the two sides may not be comparable: different settings, a tester at its limit, different
            outcomes.
        differences: Settings that differ, such as ``arrivals.rate_per_s: 4.0 → 8.0``.
        verdict: Result of the comparison in one sentence.
    """

    format: str
    before: ComparisonSide
    after: ComparisonSide
    margin: float
    confidence: float
    seed: int
    paired: bool
    block_requests: int
    method: str
    rows: list[ComparisonRow]
    caveat: str
    warnings: list[str]
    differences: list[str]
    verdict: str

    @property
    def worse(self) -> list[ComparisonRow]:
        """Returns the rows that are regressions."""
        return [row for row in self.rows if row.verdict == "worse"]

    @property
    def better(self) -> list[ComparisonRow]:
        """Returns the rows that are improvements."""
        return [row for row in self.rows if row.verdict == "better"]

    def save(self, path: Path) -> None:
        """Writes the comparison as JSON."""
        try:
            path.write_bytes(msgspec.json.encode(self))
        except OSError as error:
            raise InvalidRequest(f"Cannot write {path}: {error.strerror}. Name another file.") from None
