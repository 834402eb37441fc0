"""Virtual token counters at every level of a tree."""

from maitred.core.flow import PriorityClass
from maitred.fairness.tree import IDLE_KEPT, LazyCharges, Node, Siblings


def tree():
    top = Siblings(None, LazyCharges())
    root = top.children["class"] = Node(PriorityClass.STANDARD, top, 1.0, 0, leaf=False)
    return root.below


def test_a_newcomer_begins_at_the_level():
    group = tree()
    first = group.child("first", 1.0, 1, leaf=True)
    first.join(1.0, 1)
    first.charge(50.0)
    second = group.child("second", 1.0, 2, leaf=True)
    second.join(1.0, 2)
    assert second.counter == 50.0
    assert group.queue.least() is first


def test_when_nobody_waits_the_level_is_that_of_who_waited_last():
    group = tree()
    first, second = (group.child(name, 1.0, turn, leaf=True) for turn, name in enumerate(["first", "second"], 1))
    for turn, node in enumerate([first, second], 3):
        node.join(1.0, turn)
        node.start(turn + 10)
        node.leave(1.0)
    first.charge(70.0)
    second.charge(30.0)
    assert group.level() == 30.0


def test_the_settled_level_stays_when_charges_are_refunded():
    group = tree()
    node = group.child("node", 1.0, 1, leaf=True)
    node.join(1.0, 1)
    node.charge(50.0)
    node.start(2)
    node.charge(-40.0)
    assert node.counter == 10.0
    assert group.level() == 50.0


def test_weight_divides():
    group = tree()
    node = group.child("node", 4.0, 1, leaf=True)
    node.charge(100.0)
    assert node.counter == 25.0
    assert node.path[-1].counter == 100.0


def test_a_node_with_nothing_to_do_has_no_children():
    group = tree()
    parent = group.child("parent", 1.0, 1, leaf=False)
    child = parent.below.child("child", 1.0, 1, leaf=True)
    child.join(1.0, 2)
    child.charge(50.0)
    child.leave(1.0)
    assert parent.below is None
    assert not group.active


def test_those_who_are_ahead_are_remembered_up_to_a_number():
    group = tree()
    steady = group.child("steady", 1.0, 0, leaf=True)
    steady.join(1.0, 0)
    for number in range(1, IDLE_KEPT + 500):
        node = group.child(number, 1.0, number, leaf=True)
        node.join(1.0, number)
        node.charge(float(number))
        node.leave(1.0)
    assert len(group.idle) == IDLE_KEPT
    assert len(group.children) == IDLE_KEPT + 1
    assert 1 not in group.children
    assert IDLE_KEPT + 499 in group.children


def test_they_are_forgotten_when_the_level_has_passed_them():
    group = tree()
    steady, other = (group.child(name, 1.0, turn, leaf=True) for turn, name in enumerate(["steady", "other"]))
    steady.join(1.0, 2)
    other.join(1.0, 3)
    other.charge(50.0)
    other.leave(1.0)
    assert "other" in group.children
    steady.charge(60.0)
    steady.join(1.0, 4)
    steady.start(5)
    steady.leave(1.0)
    group.forget()
    assert "other" not in group.children


def test_what_streams_is_booked_with_each_tick():
    ticks = LazyCharges()
    top = Siblings(None, ticks)
    root = top.children["class"] = Node(PriorityClass.STANDARD, top, 1.0, 0, leaf=False)
    node = root.below.child("node", 2.0, 1, leaf=True)
    node.stream(6.0)
    ticks.now += 3
    assert (node.counter, root.counter) == (9.0, 18.0)
    node.stream(-4.0)
    node.charge(1.0)
    ticks.now += 1
    assert (node.counter, root.counter) == (10.5, 21.0)


def test_a_new_weight_does_not_change_what_was_streamed_before():
    ticks = LazyCharges()
    group = Siblings(None, ticks)
    node = group.child("node", 1.0, 1, leaf=True)
    node.stream(8.0)
    ticks.now += 1
    group.child("node", 4.0, 1, leaf=True)
    ticks.now += 1
    assert node.counter == 8.0 + 2.0
