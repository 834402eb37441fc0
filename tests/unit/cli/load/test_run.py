"""`maitred load run` and `report`: files, summary and exit codes, with a driver that makes its measurements up."""

import asyncio
import os
import signal
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner
from typer.testing import Result as Invocation

from maitred.cli.app import app
from maitred.cli.load.run import SHOWN
from maitred.load.measure.record import RequestRecord, RunData, RunProgress, UserOutcome
from maitred.load.measure.result import LoadResult
from maitred.load.report.outline import outline
from maitred.load.spec import LoadSpec
from maitred.load.workload.session import Workload


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def record(number: int, outcome: UserOutcome = UserOutcome.COMPLETE) -> RequestRecord:
    """A request that is due at its number, begins 0.5 s later, and has five tokens 0.1 s apart."""
    due_s = float(number)
    pieces = [due_s + 0.5 + 0.1 * piece for piece in range(5)] if outcome is UserOutcome.COMPLETE else []
    return RequestRecord(
        session=number,
        turn=0,
        tenant="default",
        intended_s=due_s,
        asked_tokens=5,
        sent_s=due_s,
        headers_s=due_s + 0.5 if pieces else float("nan"),
        ended_s=due_s + 1.0,
        arrivals_s=array("d", pieces),
        prompt_tokens=20,
        output_tokens=len(pieces),
        attempts=1,
        status=200 if pieces else 503,
        outcome=outcome,
        error="" if pieces else "The kitchen is closed.",
    )


def measured(outcomes: list[UserOutcome]) -> RunData:
    records = [record(number, outcome) for number, outcome in enumerate(outcomes)]
    return RunData(records=records, samples=[], seconds=len(records) + 1.0, started_unix_s=0.0, model="tiny")


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Invocation]:
    def play(*words: str, outcomes: list[UserOutcome] = [UserOutcome.COMPLETE] * 10) -> Invocation:
        async def run(
            spec: LoadSpec,
            workload: Workload | None = None,
            *,
            watch: Callable[[RunProgress], None] | None = None,
            stop: asyncio.Event | None = None,
            keep_text: bool = False,
        ) -> RunData:
            assert watch is not None
            watch(RunProgress(1.0, 0.1, 10, 2, {UserOutcome.COMPLETE: 8}, 50.0, 0.5, 0.1, 0.2, 0.0))
            return measured(outcomes)

        monkeypatch.setattr("maitred.load.play.driver.run", run)
        return CliRunner().invoke(app, ["load", "run", "--duration", "11s", *words])

    return play


def test_a_run_leaves_its_files_and_prints_its_summary(play: Callable[..., Invocation]) -> None:
    done = play("--users", "2", "--out", "results/v1.2")
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in Path("results").iterdir()) == ["v1.2.html", "v1.2.json", "v1.2.md"]
    assert LoadResult.load(Path("results/v1.2.json")).summary.outcomes == {"complete": 10}
    assert "Time to first token" in done.stdout
    assert "500 ms" in done.stdout
    assert "10 due, 2 open, 8 complete" in done.stderr
    assert "Written: results/v1.2.json, results/v1.2.md, results/v1.2.html" in done.stderr


def test_plots_are_files_that_the_markdown_shows(play: Callable[..., Invocation]) -> None:
    assert play("--users", "2", "--out", "a", "--plots", "--no-html").exit_code == 0
    plots = sorted(path.name for path in Path().glob("a-*.svg"))
    assert plots
    text = Path("a.md").read_text()
    assert all(f"(<{name}>)" in text for name in plots)
    assert not Path("a.html").exists()


def test_without_a_name_the_files_are_named_by_the_time(play: Callable[..., Invocation]) -> None:
    play("--users", "2", "--no-html")
    (file,) = Path().glob("*.json")
    assert file.name.startswith("maitred-load-20")


def test_a_suffix_in_the_name_is_not_doubled(play: Callable[..., Invocation]) -> None:
    play("--users", "2", "--no-html", "--out", "a.json")
    assert sorted(path.name for path in Path().iterdir()) == ["a.json", "a.md"]


@pytest.mark.parametrize(
    ("words", "outcomes", "exit_code"),
    [
        ([], [UserOutcome.COMPLETE] * 9 + [UserOutcome.FAILED], 0),
        ([], [UserOutcome.FAILED] * 10, 1),
        (["--objective", "ttft=600ms"], [UserOutcome.COMPLETE] * 10, 0),
        (["--objective", "ttft=400ms"], [UserOutcome.COMPLETE] * 10, 1),
        (["--objective", "ttft=600ms"], [UserOutcome.COMPLETE] * 9 + [UserOutcome.CUT], 1),
        (["--objective", "ttft=600ms", "--attainment", "0.9"], [UserOutcome.COMPLETE] * 9 + [UserOutcome.CUT], 0),
    ],
)
def test_the_exit_code_says_whether_it_was_good(
    play: Callable[..., Invocation], words: list[str], outcomes: list[UserOutcome], exit_code: int
) -> None:
    done = play("--users", "2", "--no-html", "--out", "a", *words, outcomes=outcomes)
    assert done.exit_code == exit_code
    assert Path("a.json").exists()


def test_a_place_that_cannot_be_written_is_found_before_the_run(play: Callable[..., Invocation]) -> None:
    Path("file").write_text("")
    done = play("--users", "2", "--out", "file/a")
    assert done.exit_code == 2
    assert "Cannot write file/a.json" in done.stderr
    assert "due" not in done.stderr


def test_without_matplotlib_the_figures_are_kept(
    play: Callable[..., Invocation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    done = play("--users", "2", "--out", "a")
    assert done.exit_code == 0
    assert "matplotlib" in done.stderr
    assert sorted(path.name for path in Path().iterdir()) == ["a.json", "a.md"]


def test_the_sections_that_the_terminal_shows_exist() -> None:
    spec = LoadSpec()
    titles = {
        section.title
        for section in outline(LoadResult.of(spec, measured([UserOutcome.COMPLETE]), command="", workload="")).sections
    }
    assert {"Latency", "Throughput", "Outcomes"} <= titles & set(SHOWN)


def test_report_writes_again_what_run_wrote(play: Callable[..., Invocation]) -> None:
    play("--users", "2", "--out", "a")
    before = {ending: Path(f"a.{ending}").read_text() for ending in ("md", "html")}
    done = CliRunner().invoke(app, ["load", "report", "a.json", "--out", "b"])
    assert done.exit_code == 0, done.output
    assert {ending: Path(f"b.{ending}").read_text() for ending in ("md", "html")} == before
    assert not Path("b.json").exists()
    for file in ("a.md", "nowhere.json"):
        done = CliRunner().invoke(app, ["load", "report", file])
        assert (done.exit_code, file in done.stderr) == (2, True)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_stops_in_order_and_twice_at_once(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    async def run(spec: LoadSpec, workload: Workload, *, watch: object, stop: asyncio.Event) -> RunData:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            async with asyncio.timeout(300):
                await stop.wait()
        if times == 2:
            await asyncio.Event().wait()
        return measured([UserOutcome.COMPLETE])

    monkeypatch.setattr("maitred.load.play.driver.run", run)
    done = CliRunner().invoke(app, ["load", "run", "--users", "1", "--out", "a", "--no-html"])
    assert done.stderr.count("No new requests.") == 1
    assert (done.exit_code, Path("a.json").exists()) == ((0, True) if times == 1 else (130, False))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
