"""`maitred load sweep`: what is searched, written and printed, where the server breaks down at a known rate."""

import random
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner
from typer.testing import Result as Invocation

from maitred.cli.app import app
from maitred.load.analysis.sweep import Sweep
from maitred.load.measure.record import RequestRecord, RunData, UserOutcome
from maitred.load.spec import LoadSpec
from maitred.load.workload.session import Workload

HOLDS_PER_S = 6.0


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def served(spec: LoadSpec) -> RunData:
    """Answers after 0.2 s up to a rate, and after 3 s above it."""
    rate, duration_s = spec.arrivals.rate_per_s, spec.bounds.duration_s
    assert rate is not None
    assert duration_s is not None
    draw = random.Random(spec.seed)
    wait_s = 0.2 if rate <= HOLDS_PER_S else 3.0
    records = []
    for number in range(int(rate * duration_s)):
        due_s = (number + draw.random()) / rate
        pieces = [due_s + wait_s + 0.05 * piece for piece in range(3)]
        records.append(
            RequestRecord(
                session=number,
                turn=0,
                tenant="default",
                intended_s=due_s,
                asked_tokens=3,
                sent_s=due_s,
                headers_s=pieces[0],
                ended_s=pieces[-1],
                arrivals_s=array("d", pieces),
                prompt_tokens=9,
                output_tokens=3,
                attempts=1,
                status=200,
                outcome=UserOutcome.COMPLETE,
            )
        )
    return RunData(records=records, samples=[], seconds=duration_s + wait_s, started_unix_s=0.0, model="tiny")


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Invocation]:
    async def run(spec: LoadSpec, workload: Workload, *, watch: object, stop: object) -> RunData:
        return served(spec)

    monkeypatch.setattr("maitred.load.play.driver.run", run)
    return lambda *words: CliRunner().invoke(app, ["load", "sweep", "--trial", "1m", "--out", "knee", *words])


def test_the_knee_is_found_printed_and_written(sweep: Callable[..., Invocation]) -> None:
    done = sweep("--objective", "ttft=1s", "--tolerance", "10%", "--start-rate", "2")
    assert done.exit_code == 0, done.output
    found = Sweep.load(Path("knee.json"))
    assert found.reason == "found"
    assert found.knee_per_s is not None
    assert found.knee_per_s <= HOLDS_PER_S < found.knee_per_s * 1.1
    assert [trial.rate_per_s for trial in found.trials[:3]] == [2.0, 4.0, 8.0]
    assert "2.00 sessions/s passes, 100 % met the objectives, TTFT p95 200 ms" in done.stderr
    assert "8.00 sessions/s fails, 0 % met the objectives" in done.stderr
    assert found.verdict in done.stdout
    assert sorted(path.name for path in Path().iterdir()) == ["knee.html", "knee.json", "knee.md"]


def test_no_rate_passes(sweep: Callable[..., Invocation]) -> None:
    done = sweep("--objective", "ttft=10ms", "--lowest", "0.5", "--no-html")
    assert done.exit_code == 1
    assert Sweep.load(Path("knee.json")).reason == "below_lowest"


def test_the_rate_of_a_file_is_where_it_starts(sweep: Callable[..., Invocation]) -> None:
    Path("peak.yaml").write_text("arrivals: {rate_per_s: 5}\nobjectives: {ttft_s: 1}\n")
    assert sweep("peak.yaml", "--highest", "5", "--no-html").exit_code == 0
    found = Sweep.load(Path("knee.json"))
    assert (found.reason, found.trials[0].rate_per_s) == ("at_highest", 5.0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--users", "3"), "A sweep is an open loop"),
        (("--trial", "soon"), "--trial must be a time with its unit"),
        (("--tolerance", "much"), "--tolerance much: write a share"),
        (("--lowest", "2"), "A sweep needs 0 < lowest ≤ start ≤ highest"),
    ],
)
def test_what_cannot_be_searched_says_why(
    sweep: Callable[..., Invocation], words: tuple[str, ...], expected: str
) -> None:
    done = sweep(*words)
    assert (done.exit_code, expected in done.stderr) == (2, True), done.output
