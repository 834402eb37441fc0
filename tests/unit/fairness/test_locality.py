"""Serving what shares a prefix one after the other, as far as fairness can wait."""

from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.fairness.entry import QueueEntry
from maitred.fairness.fair_queue import QueueOrderConfig, make_queue

STANDARD, BATCH = PriorityClass.STANDARD, PriorityClass.BATCH


def entry(name, locality, service=10.0, priority=STANDARD, **others):
    return QueueEntry(
        locality, Flow((FlowLevel(name),), priority), arrived_s=0.0, service=service, locality=locality, **others
    )


def order(queue, takes):
    localities = []
    for _ in range(takes):
        head = queue.head(0.0)
        assert queue.head(0.0) is head
        queue.take(head, 0.0)
        queue.charge(head.flow, head.service)
        queue.done(head.flow)
        localities.append(f"{head.flow.path[0].id}{head.value}")
    return localities


def filled(quantum, per_flow=4):
    queue = make_queue(QueueOrderConfig(quantum=quantum))
    for number in range(per_flow):
        queue.add(entry("a", "xy"[number % 2]), 0.0)
        queue.add(entry("b", "yx"[number % 2]), 0.0)
    return queue


def test_without_a_quantum_locality_is_nothing():
    assert order(filled(0.0), 8) == ["ax", "by", "ay", "bx", "ax", "by", "ay", "bx"]


def test_with_one_a_shared_prefix_runs_in_a_row():
    localities = [name[1] for name in order(filled(40.0), 8)]
    assert localities == ["x"] * 4 + ["y"] * 4


def test_a_row_is_worth_a_quantum():
    localities = "".join(name[1] for name in order(filled(20.0, per_flow=12), 16))
    assert max(len(row) for row in localities.replace("xy", "x y").replace("yx", "y x").split()) == 2


def test_nobody_leads_by_more_than_the_quantum():
    queue = make_queue(QueueOrderConfig(quantum=30.0))
    for _ in range(20):
        queue.add(entry("a", "x"), 0.0)
        queue.add(entry("b", "y"), 0.0)
    lead = most = 0
    for name in order(queue, 40):
        lead += 1 if name[0] == "a" else -1
        most = max(most, abs(lead))
    assert 1 < most <= 4


def test_inside_a_key_those_passed_over_come_after_a_quantum():
    queue = make_queue(QueueOrderConfig(quantum=30.0))
    queue.add(entry("a", "x"), 0.0)
    queue.add(entry("a", "z"), 0.0)
    for _ in range(20):
        queue.add(entry("a", "x"), 0.0)
    assert "az" in order(queue, 4)


def test_classes_are_not_mixed():
    queue = make_queue(QueueOrderConfig(quantum=1000.0))
    queue.add(entry("a", "x"), 0.0)
    queue.add(entry("b", "y"), 0.0)
    queue.add(entry("c", "x", priority=BATCH), 0.0)
    order(queue, 1)
    queue.charge(Flow((FlowLevel("nobody"),)), 0.0)
    assert order(queue, 2) == ["cx", "by"]  # The batch class was owed the turn; within it nothing is passed over.


def test_what_leaves_is_not_preferred():
    queue = make_queue(QueueOrderConfig(quantum=1000.0))
    queue.add(entry("a", "x"), 0.0)
    gone = entry("b", "x")
    queue.add(gone, 0.0)
    queue.add(entry("c", "y"), 0.0)
    queue.add(entry("c", None), 0.0)
    order(queue, 1)
    queue.remove(gone)
    assert order(queue, 2) == ["cy", "cNone"]
