import threading

import pytest

from maitred.engine.kernels.team import Team


def test_runs_every_call_once():
    done = []
    Team().run([lambda number=number: done.append(number) for number in range(50)])
    assert sorted(done) == list(range(50))


def test_runs_calls_side_by_side():
    """Each waits for the other, so one after the other they would never end."""
    meeting = threading.Barrier(2, timeout=30)
    team = Team()
    for _ in range(3):
        team.run([meeting.wait, meeting.wait])
    assert meeting.n_waiting == 0


@pytest.mark.parametrize("calls", [1, 2])
def test_raises_what_a_call_has_raised_and_goes_on_to_work(calls):
    def fail():
        raise ValueError("no")

    team, done = Team(), []
    with pytest.raises(ValueError, match="no"):
        team.run([fail] * calls)
    team.run([lambda: done.append(1)])
    assert done == [1]
