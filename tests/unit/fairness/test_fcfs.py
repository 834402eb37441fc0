"""First come, first served; with classes, the more urgent first."""

import pytest

from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.fairness.entry import QueueEntry, WorkAhead
from maitred.fairness.fair_queue import QueueOrderConfig, make_queue

FIFO = QueueOrderConfig(policy="fifo")
PRIORITY = QueueOrderConfig(policy="priority", ageing_s=10.0)


def entry(name, arrived_s, priority=PriorityClass.STANDARD, service=10.0):
    return QueueEntry(name, Flow((FlowLevel("a"),), priority), arrived_s=arrived_s, service=service)


def order(queue, now_s=0.0):
    names = []
    while (head := queue.head(now_s)) is not None:
        assert queue.head(now_s) is head
        queue.take(head, now_s)
        queue.done(head.flow)
        names.append(head.value)
    return names


def test_fifo_goes_by_arrival_alone():
    queue = make_queue(FIFO)
    queue.add(entry("second", 2.0, PriorityClass.INTERACTIVE), 2.0)
    queue.add(entry("first", 1.0, PriorityClass.BACKGROUND), 2.0)
    queue.add(entry("third", 2.0, PriorityClass.INTERACTIVE), 2.0)
    assert order(queue, 1e9) == ["first", "second", "third"]


def test_charges_change_nothing():
    queue = make_queue(FIFO)
    first, second = entry("first", 1.0), entry("second", 2.0)
    queue.add(first, 2.0)
    queue.add(second, 2.0)
    queue.charge(first.flow, 1e9)
    assert queue.over_service(first.flow) == 0.0
    assert queue.head(2.0) is first


def test_put_back_stands_where_it_stood():
    queue = make_queue(FIFO)
    first, second = entry("first", 1.0), entry("second", 2.0)
    queue.add(first, 2.0)
    queue.add(second, 2.0)
    queue.take(first, 2.0)
    assert queue.head(2.0) is second
    queue.requeue(first, 3.0)
    assert order(queue, 3.0) == ["first", "second"]


def test_priority_is_strict():
    queue = make_queue(PRIORITY)
    for name, priority in [("c", "batch"), ("d", "background"), ("a", "interactive"), ("b", "standard")]:
        queue.add(entry(name, 0.0, PriorityClass(priority)), 0.0)
    assert order(queue, 0.0) == ["a", "b", "c", "d"]


def test_priority_ages():
    queue = make_queue(PRIORITY)
    old = entry("old", 0.0, PriorityClass.BACKGROUND)
    queue.add(old, 0.0)
    queue.add(entry("new", 25.0, PriorityClass.INTERACTIVE), 25.0)
    assert queue.head(29.9).value == "new"
    assert queue.head(30.0) is old
    assert queue.waiting_in(PriorityClass.BACKGROUND) == 1
    assert order(queue, 30.0) == ["old", "new"]


def test_counts():
    queue = make_queue(PRIORITY)
    entries = [entry(number, 0.0, PriorityClass.BATCH) for number in range(3)]
    for each in entries:
        queue.add(each, 0.0)
    queue.remove(entries[1])
    assert len(queue) == queue.waiting_in(PriorityClass.BATCH) == 2
    assert queue.waiting_in(PriorityClass.INTERACTIVE) == 0
    assert set(queue) == {entries[0], entries[2]}
    assert order(queue) == [0, 2]
    with pytest.raises(KeyError):
        queue.remove(entries[1])


def test_ahead():
    queue = make_queue(PRIORITY)
    urgent = entry("urgent", 5.0, PriorityClass.INTERACTIVE, service=7.0)
    first, second = entry("first", 1.0), entry("second", 2.0)
    for queued in (urgent, first, second):
        queue.add(queued, 5.0)
    assert queue.ahead(second, 5.0) == WorkAhead(2, 17.0)
    assert queue.ahead(urgent, 5.0) == WorkAhead(0, 0.0)
    assert queue.ahead(entry("arrives", 6.0), 6.0) == WorkAhead(3, 27.0)
    fifo = make_queue(FIFO)
    fifo.add(first, 5.0)
    assert fifo.ahead(entry("arrives", 6.0, PriorityClass.INTERACTIVE), 6.0) == WorkAhead(1, 10.0)
