import random

import pytest

from maitred.load.play.client.retry import delay_s, retries_status

NOW_S = 1_790_000_000.0


class Highest(random.Random):
    def random(self) -> float:
        return 0.0


def wait_s(retry=0, **headers):
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return delay_s(retry, named, Highest(), wall_s=NOW_S)


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 529])
def test_what_may_pass_is_asked_again(status):
    assert retries_status(status, {})
    assert not retries_status(status, {b"x-should-retry": b"false"})


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_what_cannot_pass_is_not_unless_the_server_says_so(status):
    assert not retries_status(status, {})
    assert retries_status(status, {b"x-should-retry": b"true"})


def test_delays_double_up_to_eight_seconds():
    assert [wait_s(retry) for retry in range(6)] == [0.5, 1, 2, 4, 8, 8]


def test_up_to_a_quarter_is_taken_off_at_random():
    rng = random.Random(1)
    delays = [delay_s(0, {}, rng, wall_s=NOW_S) for _ in range(1000)]
    assert 0.375 <= min(delays) < 0.38
    assert 0.495 < max(delays) <= 0.5


def test_the_servers_word_is_obeyed_up_to_a_minute():
    assert wait_s(retry_after="7") == 7
    assert wait_s(retry_after_ms="1500", retry_after="7") == 1.5
    assert wait_s(retry_after="61") == 0.5
    assert wait_s(retry_after="-3") == 0.5
    assert wait_s(retry_after="soon") == 0.5


def test_a_date_is_a_time_to_come_back():
    from email.utils import formatdate

    assert wait_s(retry_after=formatdate(NOW_S + 30, usegmt=True)) == 30
    assert wait_s(retry_after=formatdate(NOW_S - 30, usegmt=True)) == 0.5
