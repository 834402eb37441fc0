"""The reports of comparisons and sweeps."""

import msgspec
import pytest

from maitred.load.analysis.comparison import FORMAT as COMPARISON
from maitred.load.analysis.comparison import ComparisonRow, ComparisonSide, RunComparison
from maitred.load.analysis.sweep import FORMAT as SWEEP
from maitred.load.analysis.sweep import Sweep, SweepTrial
from maitred.load.report import comparison as comparison_report
from maitred.load.report import html, markdown
from maitred.load.report import sweep as sweep_report
from maitred.load.report.document import CalloutLevel, Table

SIDE = ComparisonSide(
    runs=1,
    requests=200,
    started="2026-01-01T00:00:00Z",
    target="http://127.0.0.1:8000, <m>",
    workload="chat",
    outcomes={"complete": 199, "cut": 1},
)


def row(
    name: str, before: float, after: float, low: float | None, high: float | None, **fields: object
) -> ComparisonRow:
    made = ComparisonRow(
        metric=name,
        label=name,
        unit="s",
        lower_is_better=True,
        scale="ratio",
        before=before,
        after=after,
        change=after / before,
        low=low,
        high=high,
        margin=0.03,
        verdict="unclear",
    )
    return msgspec.structs.replace(made, **fields)


ROWS = [
    row("TTFT p50", 0.5, 0.4, 0.75, 0.85, verdict="better"),
    row("ITL p99", 0.1, 0.1, 0.99, 1.01, verdict="same"),
    row("TTFT p99", 1.0, 4.0, 3.5, 4.5, verdict="worse"),
    row("few", 1.0, 1.1, None, None, note="too few requests"),
    msgspec.structs.replace(row("none", 1.0, 1.0, None, None), before=None, after=None, change=None),
    row("complete", 0.99, 0.97, -0.03, -0.01, scale="difference", unit="share", change=-0.02),
]


def comparison(*rows: ComparisonRow) -> RunComparison:
    return RunComparison(
        format=COMPARISON,
        before=SIDE,
        after=SIDE,
        margin=0.03,
        confidence=0.95,
        seed=0,
        paired=False,
        block_requests=8,
        method="A bootstrap.",
        rows=list(rows),
        caveat="",
        warnings=["Different <settings>."],
        differences=["arrivals.rate_per_s: 4.0 → 8.0"],
        verdict="Worse.",
    )


def test_a_comparison_says_what_changed_by_how_much() -> None:
    document = comparison_report.outline(comparison(*ROWS))
    assert document.verdict.tone is CalloutLevel.BAD
    table = document.sections[0].blocks[0]
    assert isinstance(table, Table)
    assert table.rows[0] == ["TTFT p50", "500 ms", "400 ms", "−20.0 %", "−25.0 % … −15.0 %", "better"]
    assert table.rows[2][3] == "× 4"
    assert table.rows[3][4:] == ["–", "cannot be told (too few requests)"]
    assert table.rows[4][1:5] == ["–", "–", "–", "–"]
    assert table.rows[5][1:5] == ["99.0 %", "97.0 %", "−2.0 points", "−3.0 points … −1.0 points"]


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], ROWS[3:4], ROWS[4:5], ROWS[5:], []])
def test_every_comparison_is_drawn(rows: list[ComparisonRow]) -> None:
    made = comparison(*rows)
    drawn = comparison_report.draw(made)
    assert bool(drawn) is any(row.change is not None for row in rows)
    text = html.write(comparison_report.outline(made), drawn)
    assert "Different &lt;settings&gt;." in text
    assert "## Method" in markdown.write(comparison_report.outline(made), {})


def test_only_unclear_rows_are_no_good_news() -> None:
    assert comparison_report.outline(comparison(ROWS[3])).verdict.tone is CalloutLevel.CARE


def trial(rate_per_s: float, met: int, growth: float = 0.0, **fields: object) -> SweepTrial:
    made = SweepTrial(
        rate_per_s=rate_per_s,
        objective=0.95,
        judged=100,
        met=met,
        due=50,
        growth=growth,
        growth_deviation=1.0,
        requests_per_s=rate_per_s,
        goodput_per_s=rate_per_s * met / 100,
        ttft_p50_s=0.1 * rate_per_s,
        ttft_p95_s=0.5 * rate_per_s,
        itl_p95_s=0.02,
    )
    return msgspec.structs.replace(made, **fields)


def sweep(*trials: SweepTrial, **fields: object) -> Sweep:
    made = Sweep(
        format=SWEEP,
        spec={"target": {"url": "http://127.0.0.1:8000"}, "objectives": {"ttft_s": 1.0}},
        command="maitred load sweep",
        tolerance=0.05,
        objective=0.95,
        trials=list(trials),
        knee_per_s=2.0,
        fails_per_s=4.0,
        goodput_per_s=1.98,
        reason="found",
        verdict="It holds 2 sessions per second.",
    )
    return msgspec.structs.replace(made, **fields)


def test_a_sweep_shows_its_trials_by_rate() -> None:
    made = sweep(trial(1, 100), trial(4, 10, 30.0, limit="tester"), trial(2, 99))
    document = sweep_report.outline(made)
    assert document.verdict.tone is CalloutLevel.GOOD
    table = document.sections[1].blocks[-1]
    assert isinstance(table, Table)
    assert [cells[:3] for cells in table.rows] == [
        ["1.00", "yes", "100 %"],
        ["2.00", "yes", "99.0 %"],
        ["4.00", "no (tester)", "10.0 %"],
    ]
    assert sweep_report.draw(made).keys() == {"sweep"}
    assert "TTFT ≤ 1 s" in html.write(document, {})


@pytest.mark.parametrize(
    "made",
    [
        sweep(),
        sweep(trial(1, 100), knee_per_s=None, goodput_per_s=None, reason="below_lowest"),
        sweep(trial(1, 100, objective=None, ttft_p50_s=None, ttft_p95_s=None, itl_p95_s=None), objective=None, spec={}),
    ],
    ids=["no trials", "none holds", "no objectives, no times"],
)
def test_every_sweep_has_its_report(made: Sweep) -> None:
    text = markdown.write(sweep_report.outline(made), {})
    assert "None" not in text
    assert bool(sweep_report.draw(made)) is bool(made.trials)
