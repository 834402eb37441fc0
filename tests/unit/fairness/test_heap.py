"""A priority queue whose members may leave from the middle."""

import random

import pytest

from maitred.fairness.heap import Heap


def test_least_comes_first_and_stays_until_it_leaves():
    heap = Heap()
    for number, key in enumerate([3.0, 1.0, 2.0]):
        heap.push(key, number, f"member {number}")
    assert heap.least() == heap.least() == "member 1"
    heap.remove("member 1")
    assert heap.least() == "member 2"
    assert len(heap) == 2
    assert "member 1" not in heap


def test_ties_go_by_the_second_number():
    heap = Heap()
    heap.push(1.0, 7, "later")
    heap.push(1.0, 3, "earlier")
    assert heap.least() == "earlier"


def test_pushing_again_gives_another_key():
    heap = Heap()
    heap.push(1.0, 1, "a")
    heap.push(2.0, 2, "b")
    heap.push(3.0, 3, "a")
    assert heap.least() == "b"
    assert len(heap) == 2


def test_leaving_twice_is_a_mistake_only_for_remove():
    heap = Heap()
    heap.push(1.0, 1, "a")
    heap.discard("a")
    heap.discard("a")
    with pytest.raises(KeyError):
        heap.remove("a")
    assert heap.least() is None


def test_removed_entries_take_no_more_memory_than_present_ones():
    heap = Heap()
    for number in range(10_000):
        heap.push(float(number), number, number)
        if number >= 10:
            heap.remove(number - 10)
    assert len(heap) == 10
    assert len(heap.records) <= 60
    for again in range(10_000):
        heap.push(float(again), again, 9_999)
    assert len(heap.records) <= 60


def test_any_order_of_events_agrees_with_a_sorted_list():
    draw = random.Random(3)
    heap = Heap()
    keys = {}
    for number in range(3_000):
        member = draw.randrange(40)
        if draw.random() < 0.6:
            keys[member] = (float(draw.randrange(5)), number)
            heap.push(*keys[member], member)
        else:
            keys.pop(member, None)
            heap.discard(member)
        assert heap.least() == min(keys, key=keys.get, default=None)
        assert set(heap) == set(keys)
