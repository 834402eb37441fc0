"""Deficit round robin: flows take turns, and each turn is worth a quantum."""

from collections import Counter

import pytest

from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.fairness.entry import QueueEntry, WorkAhead
from maitred.fairness.fair_queue import QueueOrderConfig, make_queue


def flow(*names, weight=1.0):
    return Flow(tuple(FlowLevel(name, weight) for name in names))


def entry(of, value=None, arrived_s=0.0, service=100.0):
    return QueueEntry(value, of, arrived_s=arrived_s, service=service)


def add_entries(queue, of, count, service=100.0):
    for number in range(count):
        queue.add(entry(of, number, service=service), 0.0)


def serve(queue, takes, cost=None):
    served = Counter()
    for _ in range(takes):
        head = queue.head(0.0)
        assert queue.head(0.0) is head
        queue.take(head, 0.0)
        service = head.service if cost is None else cost
        queue.charge(head.flow, service)
        queue.done(head.flow)
        served[head.flow] += service
    return served


@pytest.fixture
def queue():
    return make_queue(QueueOrderConfig(policy="deficit", quantum=100.0))


def test_empty(queue):
    assert queue.head(0.0) is None
    assert len(queue) == 0
    assert list(queue) == []


def test_flows_take_turns(queue):
    one, two = flow("a"), flow("b")
    add_entries(queue, one, 50)
    add_entries(queue, two, 50)
    heads = []
    for _ in range(6):
        heads.append(queue.head(0.0).flow.path[0].id)
        serve(queue, 1)
    assert heads == list("ababab")


def test_a_turn_is_worth_a_quantum_not_a_request(queue):
    small, large = flow("small"), flow("large")
    add_entries(queue, small, 400, service=10.0)
    add_entries(queue, large, 40, service=250.0)
    served = Counter()
    while served.total() < 5000:
        served += serve(queue, 1)
    assert served[small] == pytest.approx(served[large], abs=350)


def test_weights_multiply_along_the_path(queue):
    plain, heavy = flow("a", "x"), flow("b", "y", weight=2.0)
    add_entries(queue, plain, 300)
    add_entries(queue, heavy, 300)
    served = serve(queue, 100)
    assert served[heavy] == pytest.approx(4 * served[plain], rel=0.1)


def test_real_costs_count_not_predictions(queue):
    cheap, dear = flow("cheap"), flow("dear")
    add_entries(queue, cheap, 200)
    add_entries(queue, dear, 200)
    served = Counter()
    for _ in range(100):
        head = queue.head(0.0)
        queue.take(head, 0.0)
        cost = 30.0 if head.flow is cheap else 300.0
        queue.charge(head.flow, cost)
        queue.done(head.flow)
        served[head.flow] += cost
    assert served[cheap] == pytest.approx(served[dear], abs=400)


def test_what_is_booked_for_what_runs_counts_already(queue):
    one, two = flow("a"), flow("b")
    add_entries(queue, one, 10)
    add_entries(queue, two, 10)
    taken = []
    for _ in range(4):
        taken.append(queue.head(0.0))
        queue.take(taken[-1], 0.0)
    assert Counter(head.flow.path[0].id for head in taken) == {"a": 2, "b": 2}


def test_a_refund_counts(queue):
    one, two = flow("a"), flow("b")
    add_entries(queue, one, 10)
    add_entries(queue, two, 10)
    serve(queue, 2)
    queue.charge(one, -500.0)
    assert serve(queue, 6)[one] >= 500.0


def test_arrival_decides_inside_a_flow_and_put_back_keeps_it(queue):
    first, second = entry(flow("a"), "first", 1.0), entry(flow("a"), "second", 2.0)
    queue.add(second, 2.0)
    queue.add(first, 2.0)
    queue.take(first, 2.0)
    assert queue.head(2.0) is second
    queue.requeue(first, 3.0)
    assert queue.head(3.0) is first
    assert len(queue) == 2


def test_credit_and_debt_end_with_the_last_request(queue):
    one, two = flow("a"), flow("b")
    add_entries(queue, one, 1, service=5000.0)
    serve(queue, 1)
    add_entries(queue, one, 10)
    add_entries(queue, two, 10)
    served = serve(queue, 10)
    assert served[one] == pytest.approx(served[two], abs=100)


def test_removal(queue):
    entries = [entry(flow(name), name) for name in "abc"]
    for each in entries:
        queue.add(each, 0.0)
    queue.remove(entries[1])
    assert queue.waiting_in(PriorityClass.STANDARD) == len(queue) == 2
    assert {waiting.value for waiting in queue} == {"a", "c"}
    queue.remove(entries[0])
    assert queue.head(0.0) is entries[2]
    queue.remove(entries[2])
    assert queue.head(0.0) is None


def test_ahead(queue):
    one, two = flow("a"), flow("b")
    add_entries(queue, one, 10)
    add_entries(queue, two, 3)
    assert queue.ahead(entry(one), 0.0) == WorkAhead(13, 1300.0)
    assert queue.ahead(entry(two), 0.0).entries == pytest.approx(6, abs=1)
    assert queue.ahead(entry(flow("c")), 0.0).entries <= 2


def test_over_service_is_what_a_flow_owes(queue):
    one = flow("a")
    add_entries(queue, one, 10)
    assert queue.over_service(one) == queue.over_service(flow("stranger")) == 0.0
    head = queue.head(0.0)
    queue.take(head, 0.0)
    queue.charge(one, 600.0)
    assert queue.over_service(one) == 500.0


def test_a_long_debt_is_paid_back_without_going_round_for_each_quantum():
    queue = make_queue(QueueOrderConfig(policy="deficit", quantum=1e-3))
    for name in "ab":
        add_entries(queue, flow(name), 10, service=1e6)
    assert serve(queue, 10)[flow("a")] == 5e6
