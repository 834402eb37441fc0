"""What is shown while a load runs."""

import io
import math

import pytest
from rich.console import Console
from rich.live import Live

from maitred.cli.load.progress import LiveBlock, PlainLines, showing
from maitred.load.measure.record import RunProgress, UserOutcome


def progress(at_s: float, **changes: object) -> RunProgress:
    fields: dict[str, object] = {
        "at_s": at_s,
        "share": 0.25,
        "due": 1200,
        "open": 8,
        "ended": {UserOutcome.COMPLETE: 1190, UserOutcome.TIMED_OUT: 2},
        "output_tokens_per_s": 1234.4,
        "ttft_s": 0.1234,
        "itl_s": 0.0456,
        "cpu_share": 0.5,
        "lag_s": 0.0004,
    }
    return RunProgress(**(fields | changes))  # type: ignore[arg-type]


FIRST = (
    "     1 s   25%  1,200 due, 8 open, 1,190 complete, 2 timed out  |  1,234 tokens/s, TTFT 123 ms, ITL 45.6 ms, "
    "tester 50% of a core, 400 µs late"
)


def test_plain_lines_come_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with showing("http://here") as watch:
        assert isinstance(watch, PlainLines)
        for second in [*range(1, 13), 1, 2]:  # the last two are of another run
            watch(progress(float(second)))
    title, *lines = capsys.readouterr().err.splitlines()
    assert title == "http://here"
    assert lines[0] == FIRST
    assert [line.split()[0] for line in lines] == ["1", "5", "10", "1"]


def test_nothing_arrived_yet_and_no_end_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    nan = math.nan
    PlainLines()(progress(0.0, share=None, ended={}, output_tokens_per_s=nan, ttft_s=nan, itl_s=nan))
    line = capsys.readouterr().err
    assert line == ("     0 s  1,200 due, 8 open  |  – tokens/s, TTFT –, ITL –, tester 50% of a core, 400 µs late\n")


def test_a_terminal_gets_a_block_in_place() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        block = LiveBlock("http://here", live, console)
        block(progress(1.0))
        block(progress(2.0, share=None))
        block.show("fault 0: over")
    shown = out.getvalue()
    title, bar, *_ = shown.splitlines()
    assert title.rstrip().endswith("http://here  1 s  25%")
    assert set(bar.strip()) <= set("━╸╺")
    assert "fault 0: over" in shown
    assert "http://here" in shown
    assert "1,190 complete, 2 timed out" in shown
    assert "2 s" in shown
