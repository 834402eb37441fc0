"""`maitred load chaos`: what is read, written and printed, with a rehearsal that is made up."""

import shutil
import sys
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner
from typer.testing import Result as Invocation

from maitred.cli.app import app
from maitred.load.chaos.outcome import ChaosRun, InvariantResult, State
from maitred.load.chaos.plan import ChaosPlan
from maitred.load.chaos.timeline import FaultLog
from maitred.load.measure.record import RequestRecord, RunData, UserOutcome
from maitred.load.measure.result import LoadResult

PLAN = """\
installation:
  serve: maitred serve --port {port}
load:
  arrivals: {users: 2}
  bounds: {duration_s: 30s}
faults:
  - {kind: kill, target: engine, at_s: 10}
"""


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Invocation]:
    def chaos(*words: str, text: str = PLAN, state: State = "held") -> Invocation:
        async def rehearse(plan: ChaosPlan, *, command: str, tell: Callable[[str], None], watch: object) -> ChaosRun:
            tell("The load in calm.")
            assert shutil.which("maitred") == str(Path(sys.executable).with_name("maitred"))
            record = RequestRecord(
                0,
                *(0, "default", 0.0, 1),
                sent_s=0.0,
                headers_s=0.1,
                ended_s=0.2,
                arrivals_s=array("d", [0.2]),
                prompt_tokens=9,
                output_tokens=1,
                attempts=1,
                status=200,
                outcome=UserOutcome.COMPLETE,
            )
            data = RunData(records=[record], samples=[], seconds=30.0, started_unix_s=0.0, model="tiny")
            result = LoadResult.of(plan.load, data, command=command, workload="2 users")
            return ChaosRun(
                format="maitred-chaos/1",
                maitred="0",
                command=command,
                started="2026-01-01T00:00:00Z",
                seconds=60.0,
                plan={},
                faults=[FaultLog(number=0, kind="kill", target="engine", planned_s=10.0, began_s=10.0, ended_s=10.0)],
                invariants=[
                    InvariantResult(name="recovery", state=state, bound="3 s", found="4 s", examples=["Too late."])
                ],
                calm=result,
                chaos=result,
            )

        monkeypatch.setattr("maitred.load.chaos.rehearsal.rehearse", rehearse)
        Path("plan.yaml").write_text(text)
        return CliRunner().invoke(app, ["load", "chaos", "plan.yaml", "--out", "out/a", *words])

    return chaos


@pytest.mark.parametrize(("state", "exit_code"), [("held", 0), ("unchecked", 0), ("broken", 1)])
def test_the_exit_code_says_whether_all_promises_held(
    chaos: Callable[..., Invocation], state: State, exit_code: int
) -> None:
    done = chaos("--no-html", state=state)
    assert done.exit_code == exit_code, done.output
    assert "recovery" in done.stdout
    assert "The load in calm." in done.stderr
    assert sorted(path.name for path in Path("out").iterdir()) == ["a.json", "a.md"]
    assert ChaosRun.load(Path("out/a.json")).exit_code == exit_code


def test_the_html_shows_the_faults(chaos: Callable[..., Invocation]) -> None:
    assert chaos().exit_code == 0
    assert "<svg" in Path("out/a.html").read_text()


def test_all_faults_of_a_plan_are_reported_at_once(chaos: Callable[..., Invocation]) -> None:
    done = chaos(
        text="instalation: {}\nload: {arrivals: {user: 2}}\nfaults:\n  - {kind: explode, at_s: 1}\n  - {kind: kill}\n"
    )
    assert done.exit_code == 2
    for line in (
        "plan.yaml:1: instalation: No such setting. Did you mean installation?",
        "plan.yaml:2: load.arrivals.user: No such setting. Did you mean load.arrivals.users?",
        "plan.yaml:4: faults[0].kind: Must be one of",
        "plan.yaml:5: faults[1].at_s: Must be set",
    ):
        assert line in done.stderr
    assert not Path("out").exists()


def test_what_does_not_fit_together_is_found_before_anything_starts(chaos: Callable[..., Invocation]) -> None:
    done = chaos(text=PLAN.replace("engine", "engin"))
    assert done.exit_code == 2
    assert "no process 'engin'" in done.stderr
