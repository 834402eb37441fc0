"""A new queue of the policy that the configuration names; what every policy keeps to."""

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
    queue = make_queue(QueueOrderConfig(policy=policy))
    everybody = entries(30)
    for entry in everybody:
        queue.add(entry, entry.arrived_s)
    served = []
    while (head := queue.head(40.0)) is not None:
        assert queue.head(40.0) is head
        queue.take(head, 40.0)
        queue.charge(head.flow, head.service)
        queue.done(head.flow)
        served.append(head)
    assert len(served) == len(set(served)) == 30
    assert len(queue) == 0
    assert list(queue) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_line_has_nobody_ahead_and_nobody_in_lead(policy):
    queue = make_queue(QueueOrderConfig(policy=policy))
    ahead = queue.ahead(entries(1)[0], 0.0)
    assert (ahead.entries, ahead.service) == (0, 0.0)
    assert queue.over_service(ONE_FLOW) == 0.0


@pytest.mark.parametrize("policy", POLICIES)
def test_ahead_grows_with_the_line_and_asks_nothing_of_it(policy):
    queue = make_queue(QueueOrderConfig(policy=policy, ageing_s=None))
    arrives = QueueEntry("arrives", ONE_FLOW, arrived_s=100.0, service=5.0)
    before = -1
    for entry in entries(9):
        if entry.flow is ONE_FLOW:
            queue.add(entry, 0.0)
            count = queue.ahead(arrives, 0.0).entries
            assert count > before
            before = count
    assert len(queue) == before == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_one_who_is_not_there_cannot_leave(policy):
    queue = make_queue(QueueOrderConfig(policy=policy))
    one, other = entries(2)
    queue.add(one, 0.0)
    queue.add(other, 0.0)
    queue.remove(one)
    with pytest.raises(KeyError):
        queue.remove(one)
    assert len(queue) == 1


def test_entries_say_what_they_are():
    assert repr(entries(1)[0]) == "Entry(0, arrived_s=0.0, service=5.0)"
