"""Entries in a fixed order, and how much is before one of them."""

import pytest

from maitred.core.flow import ONE_FLOW
from maitred.fairness.entry import QueueEntry, WorkAhead
from maitred.fairness.sorted_entries import LAST, EntryQueue


def filled(count, service=10.0):
    queue = EntryQueue()
    entries = []
    for number in range(count):
        entry = QueueEntry(number, ONE_FLOW, arrived_s=float(number), service=service)
        entry.number = number
        queue.join(entry.arrived_s, entry)
        entries.append(entry)
    return queue, entries


def test_order_and_sum():
    queue, entries = filled(3)
    assert queue.least() is entries[0]
    assert queue.service == 30.0
    queue.leave(entries[0])
    assert queue.least() is entries[1]
    assert queue.service == 20.0


def test_sum_of_an_empty_queue_is_zero_whatever_was_rounded():
    queue, entries = filled(3, service=0.1)
    for entry in entries:
        queue.leave(entry)
    assert queue.service == 0.0
    with pytest.raises(KeyError):
        queue.leave(entries[0])


def test_before_is_exact_for_few():
    queue, entries = filled(100)
    queue.leave(entries[4])
    assert queue.before(50.0, 50) == WorkAhead(49, 490.0)
    assert queue.before(50.0, LAST) == WorkAhead(50, 500.0)


def test_before_is_close_for_many():
    queue, _ = filled(10_000)
    ahead = queue.before(7_000.0, 7_000)
    assert ahead.entries == pytest.approx(7_000, rel=0.1)
    assert ahead.service == pytest.approx(70_000, rel=0.1)
    assert queue.before(1e9, LAST) == WorkAhead(10_000, 100_000.0)


def test_before_stays_close_while_entries_come_and_go():
    queue, entries = filled(2_000)
    assert queue.before(1_000.0, 1_000).entries == pytest.approx(1_000, rel=0.05)
    for number in range(2_000, 6_000):
        queue.leave(entries.pop(0))
        entry = QueueEntry(number, ONE_FLOW, arrived_s=float(number), service=10.0)
        entry.number = number
        queue.join(entry.arrived_s, entry)
        entries.append(entry)
        if number % 250 == 0:
            middle = entries[700]
            assert queue.before(middle.arrived_s, middle.number).entries == pytest.approx(700, abs=60)


def test_who_comes_last_has_all_before_it_exactly():
    queue, entries = filled(1_000)
    for entry in entries[:333]:
        queue.leave(entry)
    assert queue.before(1_000.0, LAST) == WorkAhead(667, 6_670.0)
    for entry in entries[333:]:
        queue.leave(entry)
    queue.join(5.0, entries[5])  # what had joined before it was empty does not count
    assert queue.before(6.0, LAST) == WorkAhead(1, 10.0)


def test_before_in_an_empty_queue():
    assert EntryQueue().before(1.0, 1) == WorkAhead(0, 0.0)
