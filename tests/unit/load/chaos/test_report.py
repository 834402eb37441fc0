"""The report, and the file that it is made from."""

import pytest

from maitred.core.errors import InvalidRequest
from maitred.load.chaos.evidence import EndState
from maitred.load.chaos.invariants import judge
from maitred.load.chaos.outcome import ChaosRun
from maitred.load.chaos.plan import ChaosFault, ChaosPlan, Installation
from maitred.load.chaos.report import draw, outline, render
from maitred.load.measure.record import RunData
from maitred.load.measure.result import LoadResult
from maitred.load.report import html
from tests.unit.load.chaos.records import SPEC, cut, evidence, fault, steady


def a_rehearsal(*, lies=False):
    plan = ChaosPlan(
        installation=Installation(url="http://127.0.0.1:8000"),
        faults=[ChaosFault(kind="kill", target="engine", at_s=5)],
    )
    chaos = [cut(0, finish_reason="stop"), *steady()[1:]] if lies else steady()
    seen = evidence(chaos, faults=[fault(5.0, said=["killed process 7"])], end=EndState(started_here=False))

    def result(records):
        return LoadResult.of(SPEC, RunData(records, [], 20.0, 0.0), command="", workload="a test")

    return ChaosRun.of(
        plan,
        seen,
        judge(seen, plan.invariants),
        command="maitred load chaos plan.yaml",
        started_unix_s=0.0,
        seconds=61.0,
        calm=result(seen.calm.records),
        chaos=result(seen.chaos.records),
        last_lines="Ready.",
    )


def test_a_sound_rehearsal():
    rehearsal = a_rehearsal()
    assert rehearsal.exit_code == 0
    text = render(rehearsal)
    assert "**✅ All 7 promises that could be checked held; 3 could not be checked.**" in text
    assert "| 0 | kill | engine | killed process 7 | 5.00 s | 5.00 s | 0 s |" in text
    assert "| … complete | 40 | 40 |" in text
    assert "maitred load chaos plan.yaml" in text


def test_what_is_broken_comes_first():
    rehearsal = a_rehearsal(lies=True)
    assert rehearsal.exit_code == 1
    text = render(rehearsal)
    assert text.index("**❌ 1 of 10 promises broken.**") < text.index("says that it is whole") < text.index("## Inv")
    assert "| no token lost or doubled | BROKEN |" in text
    assert "| … cut | 0 | 1 |" in text


def test_the_figure_has_both_runs_and_the_faults():
    svgs = draw(a_rehearsal())
    assert set(svgs) == {"chaos"}
    for words in ("in calm", "with faults", "kill engine"):
        assert words in svgs["chaos"]
    assert svgs["chaos"].strip() in html.write(outline(a_rehearsal()), svgs)


def test_the_file_comes_back(tmp_path):
    rehearsal = a_rehearsal()
    rehearsal.save(tmp_path / "below" / "chaos.json")
    again = ChaosRun.load(tmp_path / "below" / "chaos.json")
    assert render(again) == render(rehearsal)
    assert again.plan == rehearsal.plan


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "Cannot read"),
        ("{}", "is not a result of `maitred load chaos`"),
        ('{"format": "maitred-load/1"}', "is not a result of `maitred load chaos`"),
        ("no json", "is not a result of `maitred load chaos`"),
        ('{"format": "maitred-chaos/1"}', "is damaged"),
    ],
)
def test_another_file_is_refused(tmp_path, content, says):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidRequest, match=says):
        ChaosRun.load(path)
