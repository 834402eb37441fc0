"""What is learnt of a server that refuses requests for want of room."""

import pytest

from maitred.replica.health.breaker import AttemptOutcome, BreakerState
from maitred.replica.health.config import BreakerConfig, HealthConfig
from maitred.replica.upstream.status import UpstreamStatus

CONFIG = HealthConfig(breaker=BreakerConfig(first_open_s=2.0, most_open_s=8.0), most_refusals=3)


class Server:
    """A server that is up, with a clock that a test sets."""

    def __init__(self):
        self.now_s = 100.0
        self.status = UpstreamStatus("there", 5.0, CONFIG, clock=lambda: self.now_s, draw=lambda: 1.0)
        self.status.mark_up()

    def ends(self, outcome, times=1, retry_after_s=None):
        for _ in range(times):
            self.status.on_end(self.status.start_attempt(), outcome, retry_after_s=retry_after_s)


def test_requests_begin_elsewhere_after_several_refusals_in_a_row():
    server = Server()
    server.ends(AttemptOutcome.BUSY, 2)
    assert not server.status.is_refusing()
    server.ends(AttemptOutcome.SUCCESS)
    server.ends(AttemptOutcome.BUSY, 2)
    assert not server.status.is_refusing()
    server.ends(AttemptOutcome.BUSY)
    assert server.status.is_refusing()
    server.status.raise_if_unavailable()
    assert server.status.breaker_state is BreakerState.CLOSED, "whoever has nowhere else to go may still ask"


def test_one_request_at_a_time_finds_out():
    server = Server()
    server.ends(AttemptOutcome.BUSY, 3)
    server.now_s += 2.0
    assert [server.status.is_refusing() for _ in range(3)] == [False, True, True]
    server.ends(AttemptOutcome.BUSY)
    server.now_s += 3.9
    assert server.status.is_refusing(), "the time doubles"
    server.now_s += 0.2
    assert not server.status.is_refusing()
    server.ends(AttemptOutcome.SUCCESS)
    assert [server.status.is_refusing() for _ in range(3)] == [False] * 3


def test_a_first_token_is_an_answer():
    server = Server()
    server.ends(AttemptOutcome.BUSY, 3)
    server.status.on_first_token(server.status.start_attempt())
    assert not server.status.is_refusing()


@pytest.mark.parametrize(("named_s", "waited_s"), [(5.0, 5.0), (1.0, 2.0), (3_600.0, 8.0)])
def test_the_time_that_the_server_names_counts_within_bounds(named_s, waited_s):
    server = Server()
    server.ends(AttemptOutcome.BUSY, 3, retry_after_s=named_s)
    server.now_s += waited_s - 0.1
    assert server.status.is_refusing()
    server.now_s += 0.2
    assert not server.status.is_refusing()


def test_a_refused_account_is_a_failure_and_is_told_until_an_answer_comes():
    server = Server()
    server.ends(AttemptOutcome.ACCOUNT_REFUSED, 4)
    assert server.status.account_refused
    assert not server.status.is_refusing()
    server.ends(AttemptOutcome.SUCCESS)
    assert not server.status.account_refused
    server.ends(AttemptOutcome.ACCOUNT_REFUSED, 5)
    assert server.status.breaker_state is BreakerState.OPEN
