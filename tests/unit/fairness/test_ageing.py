"""Waiting makes urgent."""

from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.fairness.entry import QueueEntry
from maitred.fairness.vtc import Ageing


def entry(priority, arrived_s=0.0, number=1):
    made = QueueEntry(number, Flow((FlowLevel("a"),), priority), arrived_s=arrived_s, service=1.0)
    made.number = number
    return made


def test_moves_up_at_every_multiple_of_its_age():
    ageing = Ageing(10.0)
    old = entry(PriorityClass.BACKGROUND)
    for due_s in (10.0, 20.0, 30.0):
        ageing.watch(old)
        assert ageing.ripe(due_s - 0.1) is None
        assert ageing.ripe(due_s) is old
        assert ageing.ripe(due_s) is None
        old.rank -= 1
    ageing.watch(old)
    assert ageing.ripe(1e9) is None


def test_the_most_urgent_class_is_the_end():
    ageing = Ageing(10.0)
    ageing.watch(entry(PriorityClass.INTERACTIVE))
    assert ageing.ripe(1e9) is None


def test_those_who_left_are_forgotten():
    ageing = Ageing(10.0)
    gone, stays = entry(PriorityClass.BATCH), entry(PriorityClass.BATCH, 1.0, 2)
    ageing.watch(gone)
    ageing.watch(stays)
    ageing.forget(gone)
    assert ageing.ripe(100.0) is stays


def test_never():
    ageing = Ageing(None)
    ageing.watch(entry(PriorityClass.BACKGROUND))
    assert ageing.ripe(1e9) is None
