"""The table of batch sizes, which is a plot as well."""

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from maitred.cli.output.tune_table import WIDTH, bar, print_table
from maitred.tune.growth import BatchSizeResult, DecodeSample
from maitred.tune.report import FIGURE, draw, outline, verdict
from maitred.tune.session import TunedLimits, TuningRequest, TuningResult


def size(sequences: int, tokens_per_s: float, itl_s: float) -> BatchSizeResult:
    sample = DecodeSample(sequences=sequences, tokens_per_s=tokens_per_s, itl_p50_s=itl_s, itl_p95_s=itl_s)
    return BatchSizeResult(sequences, ((sample,),))


SIZES = [size(1, 100, 0.01), size(2, 180, 0.02), size(4, 190, 0.08)]
TUNING = TuningResult(
    wishes=TuningRequest(objective_s=0.05, prompt_tokens=256, highest=256, budget_s=60),
    sizes=SIZES,
    prefills=[],
    reason="objective",
    chosen=SIZES[1],
    limits=TunedLimits(max_sequences=2, step_tokens=64, itl_objective_s=0.05),
)


@pytest.mark.parametrize(
    ("part", "text"), [(0, ""), (1, "█" * 4), (0.5, "██"), (1 / 32, "▏"), (15 / 32, "█▉"), (2, "████"), (-1, "")]
)
def test_a_bar_is_as_long_as_its_part(part: float, text: str) -> None:
    assert bar(part, 4) == text


def test_the_table_shows_both_plots_and_the_choice() -> None:
    console = Console(file=io.StringIO(), width=120)
    print_table(console, TUNING)
    head, one, two, four = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "objective: 50 ms" in head
    assert two.split()[:3] == ["→", "2", "180"]
    assert "█" * WIDTH in four, "the most tokens are the longest bar"
    assert four.count("█") == 2 * WIDTH, "and so is the longest wait"
    assert one.rstrip().endswith("│"), "the objective is marked beyond the bars that keep it"


@pytest.mark.parametrize(
    ("tuning", "text"),
    [
        (TUNING, "2 sequences at once give 180 tokens/s, 1.80 times what one gives alone, with 20.0 ms or less"),
        (TUNING, "More would break the objective of 50 ms."),
        (replace(TUNING, reason="plateau"), "More give no more tokens, only longer waits."),
        (replace(TUNING, reason="highest"), "256 sequences is the limit of --highest or of the KV cache"),
        (replace(TUNING, reason="budget"), "the time was up. --budget gives it more."),
        (replace(TUNING, chosen=None), "Even one sequence alone has 10 ms between its tokens"),
        (replace(TUNING, limits=None), "too short to measure anything"),
    ],
)
def test_the_verdict_says_what_was_found_and_why(tuning: TuningResult, text: str) -> None:
    assert text in verdict(tuning).text


def test_the_report_has_its_figure_and_its_limits() -> None:
    document = outline(TUNING, "tiny", "maitred tune")
    assert [section.title for section in document.sections] == ["Chosen", "Batch sizes", "Prompts alone"]
    assert draw(TUNING)[FIGURE].startswith("<svg")
    assert draw(replace(TUNING, sizes=[])) == {}
