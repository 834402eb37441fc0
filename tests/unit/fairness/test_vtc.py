"""Fair shares between classes, tenants and a key's own requests."""

import gc
from collections import Counter

import pytest

from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.fairness.entry import QueueEntry, WorkAhead
from maitred.fairness.fair_queue import QueueOrderConfig, make_queue

INTERACTIVE, STANDARD, BATCH, BACKGROUND = PriorityClass


def flow(*names, priority=STANDARD, **weights):
    return Flow(tuple(FlowLevel(name, weights.get(name, 1.0)) for name in names), priority)


def entry(of, value=None, arrived_s=0.0, service=10.0, **others):
    return QueueEntry(value, of, arrived_s=arrived_s, service=service, **others)


def add_entries(queue, of, count, service=10.0, arrived_s=0.0):
    for number in range(count):
        queue.add(entry(of, number, arrived_s, service), arrived_s)


def serve(queue, takes, now_s=0.0, cost=None):
    """Takes the head so often, each charged in full at once; who was served how much."""
    served = Counter()
    for _ in range(takes):
        head = queue.head(now_s)
        if head is None:
            break
        queue.take(head, now_s)
        service = head.service if cost is None else cost
        queue.charge(head.flow, service)
        queue.done(head.flow)
        served[head.flow] += service
    return served


@pytest.fixture
def queue():
    return make_queue(QueueOrderConfig())


def test_backlogged_flows_share_by_weight(queue):
    one, two = flow("a"), flow("b", b=3.0)
    add_entries(queue, one, 100)
    add_entries(queue, two, 100)
    served = serve(queue, 80)
    assert served[two] == pytest.approx(3 * served[one], rel=0.05)


def test_a_flood_does_not_delay_others_by_more_than_one(queue):
    flood, light = flow("flood"), flow("light")
    add_entries(queue, flood, 1000)
    serve(queue, 50)
    late = entry(light)
    queue.add(late, 0.0)
    taken = []
    while late not in taken:
        taken.append(queue.head(0.0))
        serve(queue, 1)
    assert len(taken) <= 2


def test_each_level_shares_what_its_parent_gets(queue):
    flows = {name: flow(*name.split(".")) for name in ("a.x", "a.y", "b.z")}
    for each in flows.values():
        add_entries(queue, each, 200)
    served = serve(queue, 200)
    assert served[flows["b.z"]] == pytest.approx(1000, abs=20)
    assert served[flows["a.x"]] == pytest.approx(500, abs=20)


def test_a_path_may_end_where_another_goes_on(queue):
    short, long = flow("a"), flow("a", "a")
    add_entries(queue, short, 50)
    add_entries(queue, long, 50)
    served = serve(queue, 50)
    assert served[short] == served[long]
    assert serve(queue, 50).total() == 500


def test_idleness_earns_no_credit(queue):
    busy, idler = flow("busy"), flow("idler")
    add_entries(queue, busy, 200)
    add_entries(queue, idler, 1)
    serve(queue, 100)
    add_entries(queue, idler, 200)
    served = serve(queue, 40)
    assert served[idler] <= served[busy] + 10


def test_a_trickle_that_runs_earns_no_credit_either(queue):
    # It keeps one cheap request running, waits for nothing, and then comes with many.
    busy, trickle = flow("busy"), flow("trickle")
    add_entries(queue, trickle, 1)
    queue.take(queue.head(0.0), 0.0)
    add_entries(queue, busy, 200)
    for _ in range(100):
        serve(queue, 1)
        queue.charge(trickle, 0.1)
    add_entries(queue, trickle, 200)
    served = serve(queue, 40)
    assert served[trickle] <= served[busy] + 10


def test_coming_and_going_gains_nothing(queue):
    steady, swings = flow("steady"), flow("swings")
    add_entries(queue, steady, 500)
    served = Counter()
    for _ in range(50):
        add_entries(queue, swings, 2)
        served += serve(queue, 4)
    assert served[swings] <= served[steady] + 20


def test_charges_while_running_decide(queue):
    one, two = flow("a"), flow("b")
    add_entries(queue, one, 5)
    add_entries(queue, two, 5)
    queue.take(queue.head(0.0), 0.0)
    queue.charge(one, 100.0)
    assert serve(queue, 5) == {two: 50.0}
    assert queue.head(0.0).flow is one


def test_equal_counters_take_turns(queue):
    # Nothing is charged until much has been released: nobody may get all of it.
    for name in "abc":
        add_entries(queue, flow(name), 10)
    heads = []
    for _ in range(6):
        heads.append(queue.head(0.0).flow.path[0].id)
        serve(queue, 1, cost=0.0)
    assert heads == list("abcabc")


def test_newcomers_do_not_pass_one_that_waits_for_ever(queue):
    add_entries(queue, flow("a"), 2)
    serve(queue, 1, cost=0.0)
    waits = queue.head(0.0)
    for number in range(50):
        add_entries(queue, flow(f"new {number}"), 1)
        if queue.head(0.0) is waits:
            break
        serve(queue, 1, cost=0.0)
    assert queue.head(0.0) is waits


def test_a_refund_counts_at_once(queue):
    one, two = flow("a"), flow("b")
    add_entries(queue, one, 3)
    add_entries(queue, two, 3)
    queue.take(queue.head(0.0), 0.0)
    queue.charge(one, 100.0)
    assert queue.head(0.0).flow is two
    queue.charge(one, -101.0)
    assert queue.head(0.0).flow is one


def test_put_back_keeps_its_age_and_its_charges(queue):
    one, two = flow("a"), flow("b")
    first = entry(one, "first", 0.0)
    queue.add(first, 0.0)
    queue.add(entry(one, "second", 1.0), 1.0)
    queue.add(entry(two, "other", 1.0), 1.0)
    queue.take(queue.head(1.0), 1.0)
    queue.charge(one, 5.0)
    queue.requeue(first, 2.0)
    assert len(queue) == 3
    assert queue.head(2.0).value == "other"
    serve(queue, 1)
    assert queue.head(2.0) is first


def test_put_back_of_a_flow_that_waits_for_nothing_else(queue):
    alone = entry(flow("a"))
    queue.add(alone, 0.0)
    queue.take(alone, 0.0)
    assert queue.head(0.0) is None
    queue.requeue(alone, 1.0)
    assert queue.head(1.0) is alone
    serve(queue, 1)
    assert len(queue) == 0


def test_any_entry_may_be_taken(queue):
    add_entries(queue, flow("a"), 2)
    other = entry(flow("b"))
    queue.add(other, 0.0)
    queue.take(other, 0.0)
    queue.charge(other.flow, 10.0)
    queue.done(other.flow)
    assert {waiting.flow.path[0].id for waiting in queue} == {"a"}


def test_least_slack_first_inside_a_key(queue):
    key = flow("a")
    queue.add(entry(key, "none", 0.0), 0.0)
    queue.add(entry(key, "late", 1.0, deadline_s=20.0), 1.0)
    queue.add(entry(key, "long", 1.0, service=5000.0, deadline_s=22.0), 1.0)
    queue.add(entry(key, "also none", 1.0), 1.0)
    queue.add(entry(key, "far", 1.0, deadline_s=100.0), 1.0)
    values = []
    while (head := queue.head(1.0)) is not None:
        values.append(head.value)
        serve(queue, 1)
    assert values == ["long", "late", "none", "also none", "far"]


def test_classes_share_by_weight():
    queue = make_queue(QueueOrderConfig(ageing_s=None))
    for priority in PriorityClass:
        add_entries(queue, flow("a", priority=priority), 1000)
    served = serve(queue, 1500)
    shares = [round(served[flow("a", priority=priority)] / 1000) for priority in PriorityClass]
    assert shares == [8, 4, 2, 1]


def test_a_class_that_comes_back_is_first_among_equals(queue):
    add_entries(queue, flow("a", priority=BATCH), 50)
    serve(queue, 10)
    add_entries(queue, flow("b", priority=INTERACTIVE), 1)
    assert queue.head(0.0).flow.priority is INTERACTIVE


def test_classes_that_are_not_named_weigh_one():
    queue = make_queue(QueueOrderConfig(class_weights={INTERACTIVE: 3.0}, ageing_s=None))
    for priority in (INTERACTIVE, BACKGROUND):
        add_entries(queue, flow("a", priority=priority), 100)
    served = serve(queue, 80)
    assert served[flow("a", priority=INTERACTIVE)] == 600


def test_counts_go_by_the_class_that_was_asked_for():
    queue = make_queue(QueueOrderConfig(ageing_s=1.0))
    add_entries(queue, flow("a", priority=BACKGROUND), 3)
    queue.head(100.0)
    assert queue.waiting_in(BACKGROUND) == 3
    assert queue.waiting_in(INTERACTIVE) == 0
    serve(queue, 3, 100.0)
    assert queue.waiting_in(BACKGROUND) == 0


def test_what_has_aged_is_charged_where_it_was_taken():
    queue = make_queue(QueueOrderConfig(ageing_s=10.0))
    old, fresh = flow("old", priority=STANDARD), flow("new", priority=INTERACTIVE)
    add_entries(queue, old, 1, arrived_s=0.0)
    queue.head(10.0)
    add_entries(queue, fresh, 2, arrived_s=10.0)
    aged = queue.head(10.0)
    assert aged.flow is old
    assert aged.rank == INTERACTIVE.rank
    queue.take(aged, 10.0)
    queue.charge(old, 100.0)
    assert queue.over_service(old) == 100.0
    assert queue.head(10.0).flow is fresh


def test_a_flood_does_not_become_urgent_by_waiting():
    # Its requests wait long, but only for one another; something of it begins all the time.
    queue = make_queue(QueueOrderConfig(ageing_s=10.0))
    flood, light = flow("flood"), flow("light")
    add_entries(queue, flood, 500)
    for second in range(200):
        serve(queue, 1, float(second))
        if second % 20 == 0:
            queue.add(entry(light, arrived_s=second), second)
    assert {waiting.rank for waiting in queue} == {STANDARD.rank}


def test_every_request_moves_up_in_its_own_time_while_its_class_is_passed_over():
    queue = make_queue(QueueOrderConfig(ageing_s=10.0))
    queue.add(entry(flow("a", "x", priority=BATCH), "first"), 0.0)
    queue.add(entry(flow("a", "y", priority=BATCH), "second"), 4.0)
    moves = {}
    for tenths in range(300):
        queue.head(tenths / 10)
        for waiting in queue:
            moves.setdefault((waiting.value, waiting.rank), tenths / 10)
    assert moves == {
        ("first", 2): 0.0,
        ("first", 1): 10.0,
        ("first", 0): 20.0,
        ("second", 2): 0.0,
        ("second", 1): 14.0,
        ("second", 0): 24.0,
    }


def test_what_begins_sets_the_clock_of_its_class_back():
    queue = make_queue(QueueOrderConfig(ageing_s=10.0))
    add_entries(queue, flow("a", priority=BATCH), 2)
    add_entries(queue, flow("b", priority=BACKGROUND), 1)
    queue.take(next(waiting for waiting in queue if waiting.flow.path[0].id == "a"), 6.0)
    queue.head(15.9)
    assert {waiting.flow.path[0].id: waiting.rank for waiting in queue} == {"a": 2, "b": 2}
    queue.head(16.0)
    assert {waiting.flow.path[0].id: waiting.rank for waiting in queue} == {"a": 1, "b": 2}


def test_looking_late_is_as_good_as_looking_all_the_time():
    queue = make_queue(QueueOrderConfig(ageing_s=10.0))
    add_entries(queue, flow("a", priority=BACKGROUND), 2)
    queue.head(1000.0)
    assert {waiting.rank for waiting in queue} == {INTERACTIVE.rank}


def test_without_ageing_nothing_moves_up():
    queue = make_queue(QueueOrderConfig(ageing_s=None))
    add_entries(queue, flow("a", priority=BACKGROUND), 3)
    queue.head(1e9)
    assert {waiting.rank for waiting in queue} == {BACKGROUND.rank}


def test_a_flow_that_runs_from_two_classes_is_charged_in_both():
    queue = make_queue(QueueOrderConfig(ageing_s=10.0, class_weights=dict.fromkeys(PriorityClass, 1.0)))
    mixed = flow("a", priority=STANDARD)
    old, young = entry(mixed, arrived_s=0.0), entry(mixed, arrived_s=9.0)
    queue.add(old, 0.0)
    queue.add(young, 9.0)
    assert queue.head(10.0) is old
    queue.take(old, 10.0)
    queue.take(young, 10.0)
    queue.charge(mixed, 100.0)
    others = [flow("b", priority=priority) for priority in (INTERACTIVE, STANDARD)]
    assert queue.over_service(mixed) == 0.0
    for other in others:
        queue.add(entry(other), 10.0)
    # Each class has one half of it, so the more urgent is first among equals.
    assert queue.head(10.0).flow is others[0]
    queue.charge(mixed, 2.0)
    queue.done(mixed)
    queue.charge(mixed, 10.0)
    assert queue.head(10.0).flow is others[0]
    queue.done(mixed)
    assert serve(queue, 2, 10.0).total() == 20.0


def test_over_service_adds_the_leads_of_all_levels(queue):
    x, y, z = flow("a", "x"), flow("a", "y", y=2.0), flow("b", "z")
    for flow_ in (x, y, z):
        add_entries(queue, flow_, 2)
        queue.take(next(waiting for waiting in queue if waiting.flow is flow_), 0.0)
    queue.charge(x, 30.0)
    queue.charge(y, 20.0)
    queue.charge(z, 10.0)
    assert queue.over_service(z) == 0.0
    assert queue.over_service(y) == (50 - 10) + 0
    assert queue.over_service(x) == (50 - 10) + (30 - 10)
    assert queue.over_service(flow("stranger")) == 0.0


def test_lead_is_over_those_that_wait(queue):
    slow, busy, back = flow("slow"), flow("busy"), flow("back")
    add_entries(queue, slow, 1)
    queue.take(queue.head(0.0), 0.0)
    add_entries(queue, busy, 3)
    queue.take(queue.head(0.0), 0.0)
    queue.charge(busy, 900.0)
    add_entries(queue, back, 1)
    # Lifted to the one that waits, it is far ahead of the one whose only request runs, and yet it is its turn.
    assert queue.over_service(back) == 900.0
    assert queue.lead(back) == 0.0
    queue.charge(back, 40.0)
    assert queue.lead(back) == 40.0
    assert queue.lead(flow("stranger")) == 0.0


def test_nobody_leads_where_nobody_waits(queue):
    add_entries(queue, flow("only"), 1)
    queue.take(queue.head(0.0), 0.0)
    queue.charge(flow("only"), 10.0)
    assert queue.lead(flow("only")) == 0.0


def test_idle_flows_are_forgotten(queue):
    keeps_waiting = flow("steady")
    add_entries(queue, keeps_waiting, 3000)
    for number in range(2000):
        add_entries(queue, flow(f"org {number}", "key"), 1)
        serve(queue, 2)
    assert nodes(queue) < 60


def test_a_late_charge_to_a_flow_that_is_forgotten_is_nothing(queue):
    add_entries(queue, flow("a"), 1)
    serve(queue, 1)
    queue.charge(flow("a"), 1e6)
    queue.charge(flow("b"), 1e6)
    add_entries(queue, flow("a"), 1)
    add_entries(queue, flow("c"), 1)
    assert queue.head(0.0).flow == flow("a")


def test_a_late_refund_to_a_flow_that_is_remembered_counts(queue):
    add_entries(queue, flow("waits"), 5)
    for name in ("a", "b"):
        add_entries(queue, flow(name), 1)
    for waiting in [waiting for waiting in queue if waiting.flow.path[0].id != "waits"]:
        queue.take(waiting, 0.0)
        queue.charge(waiting.flow, 100.0)
        queue.done(waiting.flow)
    queue.charge(flow("b"), -50.0)
    for name in ("a", "b"):
        add_entries(queue, flow(name), 10)
    served = serve(queue, 5 + 13)
    assert served[flow("b")] == served[flow("a")] + 50


def test_a_weight_counts_from_when_it_is_set(queue):
    before, after = flow("a"), flow("a", a=4.0)
    add_entries(queue, before, 10)
    add_entries(queue, flow("b"), 200)
    serve(queue, 20)
    add_entries(queue, after, 200)
    served = serve(queue, 50)
    assert served[after] == pytest.approx(4 * served[flow("b")], rel=0.1)


def test_ahead_of_a_light_arrival_is_little_and_of_the_flood_all(queue):
    flood, light = flow("flood"), flow("light")
    add_entries(queue, flood, 100)
    assert queue.ahead(entry(light), 0.0) == WorkAhead(1, 10.0)
    assert queue.ahead(entry(flood), 0.0) == WorkAhead(100, 1000.0)


def test_ahead_counts_what_others_get_meanwhile(queue):
    one, two, heavy = flow("a"), flow("b"), flow("c", c=2.0)
    add_entries(queue, one, 10)
    add_entries(queue, two, 3)
    add_entries(queue, heavy, 100)
    assert queue.ahead(entry(one), 0.0).entries == pytest.approx(10 + 3 + 20, abs=2)


def test_ahead_in_the_line_agrees_with_what_happens():
    queue = make_queue(QueueOrderConfig(ageing_s=None))
    flows = [flow("a", "x"), flow("a", "y"), flow("b", "z", b=2.0), flow("c", "u", priority=BATCH)]
    for each, count in zip(flows, (30, 5, 40, 20), strict=True):
        add_entries(queue, each, count)
    expected = {waiting: queue.ahead(waiting, 0.0).entries for waiting in queue}
    for position in range(95):
        head = queue.head(0.0)
        assert abs(expected[head] - position) <= 6
        serve(queue, 1)


def test_ahead_of_a_thousand_flows_is_an_estimate(queue):
    for number in range(1000):
        add_entries(queue, flow(f"tenant {number}"), 10)
    ahead = queue.ahead(entry(flow("tenant 5")), 0.0)
    assert ahead.entries == pytest.approx(10_000, rel=0.1)
    assert queue.ahead(entry(flow("new")), 0.0).entries <= 1000


@pytest.mark.parametrize("weights", [{}, {BACKGROUND: 1e-6, BATCH: 1e-6, STANDARD: 1e-6, INTERACTIVE: 1.0}])
@pytest.mark.parametrize("priority", [STANDARD, BATCH, BACKGROUND])
def test_overload_of_interactive_work_starves_nobody_beyond_the_bound(weights, priority):
    # Interactive flows never stop waiting. With weights that leave the other classes nothing, only age helps them.
    ageing_s, step_s, slots, per_step, cost = 10.0, 0.1, 4, 5.0, 50.0
    config = QueueOrderConfig(ageing_s=ageing_s, **({"class_weights": weights} if weights else {}))
    queue = make_queue(config)
    users = [flow(f"user {number}", priority=INTERACTIVE) for number in range(8)]
    # One of them is served at once, for it finds its class unserved. The others of its class have to wait.
    patient = [entry(flow(f"patient {n}", priority=priority), "patient", 0.0, cost) for n in range(4)]
    running, handed_out, now_s = [], 0.0, 0.0
    taken_s, handed_out_since = {}, {}
    for waiting in patient:
        queue.add(waiting, 0.0)
    while len(taken_s) < len(patient) and now_s < 100.0:
        for user in users:
            add_entries(queue, user, 3 - sum(w.flow is user for w in queue), cost, now_s)
        while len(running) < slots:
            head = queue.head(now_s)
            queue.take(head, now_s)
            queue.charge(head.flow, per_step)
            handed_out += per_step
            running.append([head, per_step])
            if head.value == "patient":
                taken_s[head] = now_s
        if now_s >= priority.rank * ageing_s:
            for waiting in patient:
                handed_out_since.setdefault(waiting, handed_out)
                if waiting not in taken_s:
                    siblings, batch = len(users) + len(patient) - 1, slots * cost
                    share = config.class_weights[INTERACTIVE] / sum(config.class_weights.values())
                    bound = (siblings * cost + 2 * batch) / share + batch
                    assert handed_out - handed_out_since[waiting] <= bound
        for run in list(running):
            queue.charge(run[0].flow, per_step)
            handed_out += per_step
            run[1] += per_step
            if run[1] >= cost:
                queue.done(run[0].flow)
                running.remove(run)
        now_s += step_s
    assert len(taken_s) == len(patient)
    if weights:
        assert max(taken_s.values()) >= priority.rank * ageing_s


def nodes(queue):
    """How many nodes a fair queue keeps."""
    count, pending = 0, list(queue._classes)
    while pending:
        node = pending.pop()
        count += 1
        pending.extend(() if node.below is None else node.below.children.values())
    return count


def test_who_comes_and_goes_leaves_nothing_for_pythons_collector(queue):
    flows = [flow("org", "team", "key"), flow("org", "team", "other"), flow("lonely")]
    gc.collect()
    gc.disable()
    try:
        for of in flows * 20:
            one = entry(of)
            queue.add(one, 0.0)
            queue.take(one, 0.0)
            queue.charge(of, 5.0)
            queue.done(of)
        del one
        assert gc.collect() == 0
    finally:
        gc.enable()
