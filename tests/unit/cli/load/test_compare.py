"""`maitred load compare`: what is read, what is written, and the exit codes."""

import random
from array import array
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner
from typer.testing import Result as Invocation

from maitred.cli.app import app
from maitred.cli.load.compare import parse_share
from maitred.core.errors import InvalidRequest
from maitred.load.analysis.comparison import RunComparison
from maitred.load.measure.record import RequestRecord, RunData, UserOutcome
from maitred.load.measure.result import LoadResult
from maitred.load.spec import ArrivalsSpec, LoadSpec, StopCondition


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def save(path: str, slowness: float, seed: int) -> None:
    """A run of 400 requests, whose times are drawn and multiplied."""
    draw = random.Random(seed)
    records = []
    for number in range(400):
        due_s = number * 0.1
        first_s = due_s + slowness * draw.uniform(0.4, 0.6)
        pieces = [first_s + slowness * 0.05 * piece for piece in range(4)]
        records.append(
            RequestRecord(
                session=number,
                turn=0,
                tenant="default",
                intended_s=due_s,
                asked_tokens=4,
                sent_s=due_s,
                headers_s=first_s,
                ended_s=pieces[-1],
                arrivals_s=array("d", pieces),
                prompt_tokens=20,
                output_tokens=4,
                attempts=1,
                status=200,
                outcome=UserOutcome.COMPLETE,
            )
        )
    data = RunData(records=records, samples=[], seconds=41.0, started_unix_s=0.0, model="tiny")
    spec = LoadSpec(arrivals=ArrivalsSpec(rate_per_s=10.0), bounds=StopCondition(duration_s=40.0))
    LoadResult.of(spec, data, command="", workload="400 requests").save(Path(path))


def compare(*words: str) -> Invocation:
    return CliRunner().invoke(app, ["load", "compare", *words])


def test_what_is_worse_fails() -> None:
    save("a.json", 1.0, 1)
    save("b.json", 1.5, 2)
    done = compare("a.json", "b.json", "--json", "c.json", "--html", "c.html")
    assert done.exit_code == 1, done.output
    assert "Worse" in done.stdout
    assert "TTFT p50" in done.stdout
    assert "worse" in {row.verdict for row in msgspec.json.decode(Path("c.json").read_bytes(), type=RunComparison).rows}
    assert "<svg" in Path("c.html").read_text()
    assert "Written: c.json, c.html" in done.stderr
    assert compare("b.json", "a.json").exit_code == 0


def test_folders_of_results() -> None:
    for number in range(2):
        save(f"before/{number}.json", 1.0, number)
        save(f"after/{number}.json", 1.0, 10 + number)
    done = compare("before", "after", "--margin", "20%")
    assert done.exit_code == 0, done.output


def test_what_cannot_be_compared_says_why() -> None:
    save("a.json", 1.0, 1)
    Path("empty").mkdir()
    Path("mixed").mkdir()
    Path("mixed/other.json").write_text("{}")
    for words, expected in (
        (("a.json", "nowhere.json"), "nowhere.json"),
        (("a.json", "empty"), "There are no results in empty."),
        (("mixed", "a.json"), "mixed/other.json is not a result of `maitred load run`."),
        (("a.json", "a.json", "--margin", "3 percent"), "--margin 3 percent: write a share below 1"),
        (("a.json", "a.json", "--confidence", "20%"), "The confidence must be at least 0.5"),
    ):
        done = compare(*words)
        assert (done.exit_code, expected in done.stderr) == (2, True), done.output


@pytest.mark.parametrize(("text", "share"), [("3%", 0.03), ("0.03", 0.03), (" 0.5 %", 0.005), ("0", 0.0)])
def test_shares(text: str, share: float) -> None:
    assert parse_share("--margin", text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "3%%", "150%", "-1%", "x", "nan"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_share("--margin", text)
