"""Comparison of two sides, row by row."""

from pathlib import Path
from typing import Literal

import msgspec

from maitred.core.errors import InvalidRequest

FORMAT = "maitred-comparison/1"

Verdict = Literal["same", "better", "worse", "unclear"]
"""Of one metric: the interval lies within the margin; the change is real and larger than the margin; or neither can be
said from so many requests."""


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of both sides.

    Attributes:
        metric: Such as ``ttft_p50`` or ``output_tokens_per_s``.
        label: The same for people.
        unit: ``s``, ``1/s`` or ``share``.
        lower_is_better: Direction.
        scale: Whether the change is given as ratio (after over before) or, for shares, as difference.
        before, after: Geometric mean over the side's runs (shares: mean). None: no run has it.
        change: After over before, or after minus before, as `scale` says. None: cannot be formed.
        low, high: Interval of `change` that holds for all rows at once with the comparison's confidence. None: too few
            requests to give one.
        margin: Changes within this are no difference; in `change`'s scale, 0.03 being 3 % or 3 points.
        verdict: See `Verdict`.
        note: Why there is no interval; else empty.
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
        """After over before; None for shares."""
        return self.change if self.scale == "ratio" else None


class ComparisonSide(msgspec.Struct, frozen=True, kw_only=True):
    """Side of a comparison.

    Attributes:
        runs: How many.
        requests: Counted, of all runs.
        started: Of the first run, UTC.
        target: Address and model.
        workload: One line.
        outcomes: How the counted requests ended.
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
        before, after: The sides.
        margin, confidence, seed: As asked for.
        paired: Whether both sides played the same requests, so that each was compared with its twin.
        block_requests: Neighbouring requests that were resampled together (longest over the runs).
        method: The statistics in a sentence, for the report's footnote.
        rows: One per metric.
        caveat: What the intervals do not contain; empty: nothing known.
        warnings: Why the two may not be comparable: different settings, a tester at its limit, different outcomes.
        differences: Settings that differ, such as ``arrivals.rate_per_s: 4.0 → 8.0``.
        verdict: The whole in one sentence.
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
        """Rows that are regressions."""
        return [row for row in self.rows if row.verdict == "worse"]

    @property
    def better(self) -> list[ComparisonRow]:
        """Rows that are improvements."""
        return [row for row in self.rows if row.verdict == "better"]

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        try:
            path.write_bytes(msgspec.json.encode(self))
        except OSError as error:
            raise InvalidRequest(f"Cannot write {path}: {error.strerror}. Name another file.") from None
