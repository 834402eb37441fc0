"""The other promises, and which are judged."""

import pytest

from maitred.load.chaos.evidence import EndState
from maitred.load.chaos.invariants import clean_end, faults_played, judge, nothing_left, remains
from maitred.load.chaos.plan import Invariants
from tests.unit.load.chaos.records import evidence, fault

EMPTY = {
    "maitred_in_flight": 0.0,
    "maitred_engine_running": 0.0,
    "maitred_engine_waiting": 0.0,
    "maitred_engine_kv_blocks_free": 64.0,
    "maitred_engine_kv_blocks_total": 64.0,
}
NONE = Invariants(
    same_answers=False,
    ends_within_s=None,
    no_double_bill=False,
    overshoot_tokens=None,
    recovery_s=None,
    throughput_recovery_s=None,
    nothing_left_s=None,
    clean_end=False,
)


def test_all_promises_are_judged_by_default_and_none_but_the_first_when_all_are_off():
    end = EndState(gauges=EMPTY, settled_s=0.2)
    verdicts = judge(evidence(faults=[fault(5.0)], end=end), Invariants())
    assert {verdict.name: verdict.state for verdict in verdicts} == {
        "faults played": "held",
        "no token lost or doubled": "held",
        "every request ends": "held",
        "no double bill": "held",
        "bounded overshoot": "held",
        "no budget overspent": "unchecked",
        "recovery": "held",
        "throughput recovery": "held",
        "nothing left": "held",
        "clean end": "held",
    }
    assert [verdict.name for verdict in judge(evidence(), NONE)] == ["faults played"]


def test_a_fault_that_did_not_happen_is_reported():
    verdict = faults_played(evidence(faults=[fault(5.0), fault(6.0, number=1, error="No such process.")]))
    assert verdict.state == "broken"
    assert verdict.found == "1 of 2"
    assert verdict.examples == ["fault 1 (kill): No such process."]


def test_an_empty_system_passes():
    assert nothing_left(EndState(gauges=EMPTY, settled_s=0.3), 5).found == "nothing, 0.3 s after the load"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("maitred_in_flight", 2, "2 in flight"),
        ("maitred_engine_running", 1, "1 running"),
        ("maitred_engine_waiting", 1, "1 waiting"),
        ("maitred_engine_kv_blocks_free", 60, "4 KV blocks held"),
    ],
)
def test_whatever_is_left_is_caught(name, value, says):
    gauges = EMPTY | {name: value}
    assert remains(gauges) == [says]
    verdict = nothing_left(EndState(gauges=gauges), 5)
    assert (verdict.state, verdict.examples) == ("broken", [says])


def test_a_silent_server_has_not_kept_it_and_one_without_metrics_cannot_show_it():
    assert nothing_left(EndState(answers=False), 5).state == "broken"
    assert nothing_left(EndState(gauges={"up": 1.0}, settled_s=0.0), 5).state == "unchecked"


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (EndState(), "held"),
        (EndState(exit_code=1), "broken"),
        (EndState(exit_code=None), "broken"),
        (EndState(leftovers=["process 7 outlived it"]), "broken"),
        (EndState(started_here=False, exit_code=None), "unchecked"),
    ],
)
def test_the_end(end, state):
    assert clean_end(end).state == state
