"""A new line of the policy that the configuration names; what every policy keeps to."""

import msgspec
import pytest

from maitred.core.flow import ONE_FLOW, Flow, FlowLevel, PriorityClass
from maitred.fairness.fair_queue import QueueEntry, QueueOrderConfig, make_queue

POLICIES = ["fair", "fifo", "priority", "deficit"]
FLOWS = [ONE_FLOW, Flow((FlowLevel("a"), FlowLevel("b", 2.0)), PriorityClass.BATCH), Flow((FlowLevel("c"),))]


def entries(count):
    return [QueueEntry(number, FLOWS[number % 3], arrived_s=float(number), service=5.0) for number in range(count)]


def test_the_default_is_fair():
    config = QueueOrderConfig()
    assert config.policy == "fair"
    assert config.quantum == 0.0
    assert [config.class_weights[priority] for priority in PriorityClass] == [8, 4, 2, 1]


@pytest.mark.parametrize(
    "fault", [{"policy": "lottery"}, {"ageing_s": 0}, {"quantum": -1}, {"class_weights": {"batch": 0}}]
)
def test_what_makes_no_sense_is_refused(fault):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fault, QueueOrderConfig)


@pytest.mark.parametrize("policy", POLICIES)
def test_everybody_is_served_once(policy):
    line = make_queue(QueueOrderConfig(policy=policy))
    everybody = entries(30)
    for entry in everybody:
        line.add(entry, entry.arrived_s)
    served = []
    while (head := line.head(40.0)) is not None:
        assert line.head(40.0) is head
        line.take(head, 40.0)
        line.charge(head.flow, head.service)
        line.done(head.flow)
        served.append(head)
    assert len(served) == len(set(served)) == 30
    assert len(line) == 0
    assert list(line) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_line_has_nobody_ahead_and_nobody_in_lead(policy):
    line = make_queue(QueueOrderConfig(policy=policy))
    ahead = line.ahead(entries(1)[0], 0.0)
    assert (ahead.entries, ahead.service) == (0, 0.0)
    assert line.over_service(ONE_FLOW) == 0.0


@pytest.mark.parametrize("policy", POLICIES)
def test_ahead_grows_with_the_line_and_asks_nothing_of_it(policy):
    line = make_queue(QueueOrderConfig(policy=policy, ageing_s=None))
    arrives = QueueEntry("arrives", ONE_FLOW, arrived_s=100.0, service=5.0)
    before = -1
    for entry in entries(9):
        if entry.flow is ONE_FLOW:
            line.add(entry, 0.0)
            count = line.ahead(arrives, 0.0).entries
            assert count > before
            before = count
    assert len(line) == before == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_one_who_is_not_there_cannot_leave(policy):
    line = make_queue(QueueOrderConfig(policy=policy))
    one, other = entries(2)
    line.add(one, 0.0)
    line.add(other, 0.0)
    line.remove(one)
    with pytest.raises(KeyError):
        line.remove(one)
    assert len(line) == 1


def test_entries_say_what_they_are():
    assert repr(entries(1)[0]) == "Entry(0, arrived_s=0.0, service=5.0)"
