from hypothesis import given
from hypothesis import strategies as st

from maitred.core.replica import LoadReport, StepTimes
from maitred.replica.engine.connection import HEARTBEAT_TICKS, HeartbeatAction, HeartbeatMonitor

IDLE = LoadReport()


def test_it_asks_after_one_silent_interval_and_gives_up_after_all():
    heart = HeartbeatMonitor(12.0)
    assert heart.interval_s == 12.0 / HEARTBEAT_TICKS
    beats = [heart.tick(IDLE) for _ in range(HEARTBEAT_TICKS)]
    assert beats == [
        HeartbeatAction.PING,
        *[HeartbeatAction.NOTHING] * (HEARTBEAT_TICKS - 2),
        HeartbeatAction.DISCONNECT,
    ]


@given(st.lists(st.booleans(), max_size=100))
def test_who_says_something_in_every_other_interval_is_never_given_up(words):
    heart = HeartbeatMonitor(1.0)
    for word in words:
        for _ in range(HEARTBEAT_TICKS - 1 if not word else 1):
            assert heart.tick(IDLE) is not HeartbeatAction.DISCONNECT
        heart.on_data()


def test_long_steps_are_waited_for():
    slow = LoadReport(step_tokens=100, times=StepTimes(fixed_s=1.0, token_s=0.09))
    heart = HeartbeatMonitor(6.0)
    beats = [heart.tick(slow) for _ in range(30)]
    assert beats.index(HeartbeatAction.DISCONNECT) == 29, "three times ten seconds"
