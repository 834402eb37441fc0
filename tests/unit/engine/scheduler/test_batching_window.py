import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.flow import PriorityClass
from maitred.engine.scheduler.batching_window import BatchingWindow

BATCH, INTERACTIVE = PriorityClass.BATCH, PriorityClass.INTERACTIVE


def window(**windows_s):
    return BatchingWindow({PriorityClass(name): seconds for name, seconds in windows_s.items()}, 4)


def test_without_windows_nobody_is_held_back():
    held = window(batch=0.0)
    held.on_join(BATCH, 0.0)
    assert held.hold_s(0.0, running=0, waiting=1) == 0


def test_a_request_is_held_back_for_what_is_left_of_its_window():
    held = window(batch=1.0)
    held.on_join(BATCH, 10.0)
    assert held.hold_s(10.25, running=0, waiting=1) == pytest.approx(0.75)
    assert held.hold_s(11.0, running=0, waiting=1) == 0


def test_the_first_to_come_is_not_held_back_longer_for_those_behind_it():
    held = window(batch=1.0)
    held.on_join(BATCH, 10.0)
    held.on_join(BATCH, 10.5)
    assert held.hold_s(10.5, running=0, waiting=2) == pytest.approx(0.5)


def test_a_request_that_must_not_wait_takes_all_with_it():
    held = window(batch=1.0)
    held.on_join(BATCH, 10.0)
    held.on_join(INTERACTIVE, 10.1)
    assert held.hold_s(10.1, running=0, waiting=2) == 0
    assert held.hold_s(10.1, running=0, waiting=2) == 0


def test_a_running_batch_is_joined_at_once():
    held = window(batch=1.0)
    held.on_join(BATCH, 10.0)
    assert held.hold_s(10.0, running=1, waiting=1) == 0


def test_enough_of_them_do_not_wait_for_more():
    held = window(batch=1.0)
    for _ in range(4):
        held.on_join(BATCH, 10.0)
    assert held.hold_s(10.0, running=0, waiting=4) == 0


def test_nobody_is_held_back_when_nobody_else_is_expected():
    held = window(batch=1.0)
    for arrival in range(5):
        held.on_join(BATCH, 60.0 * arrival)
        held.hold_s(60.0 * arrival + 1.0, running=0, waiting=1)
    held.on_join(BATCH, 300.0)
    assert held.hold_s(300.0, running=0, waiting=1) == 0


def test_what_was_preempted_is_not_held_back():
    assert window(batch=1.0).hold_s(10.0, running=0, waiting=3) == 0


@given(
    windows_s=st.dictionaries(st.sampled_from(list(PriorityClass)), st.floats(0, 5)),
    arrivals=st.lists(st.tuples(st.sampled_from(list(PriorityClass)), st.floats(0, 3)), min_size=1, max_size=20),
)
def test_nobody_is_held_back_longer_than_its_class_allows(windows_s, arrivals):
    held = BatchingWindow(windows_s, 4)
    now_s, waiting = 0.0, []
    for priority, gap_s in arrivals:
        # Between two arrivals the engine asks again at the given time.
        while waiting and (hold_s := held.hold_s(now_s, running=0, waiting=len(waiting))) > 0:
            if hold_s > gap_s:
                break
            now_s, gap_s = now_s + hold_s, gap_s - hold_s
        else:
            assert all(now_s <= arrived_s + windows_s.get(name, 0.0) + 1e-6 for name, arrived_s in waiting)
            waiting.clear()
        now_s += gap_s
        held.on_join(priority, now_s)
        waiting.append((priority, now_s))
        assert held.hold_s(now_s, running=0, waiting=len(waiting)) <= windows_s.get(priority, 0.0) + 1e-6
