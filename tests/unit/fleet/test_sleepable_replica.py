"""Orders to an engine that can sleep, and what it has not carried out yet."""

from maitred.fleet.sleepable_replica import SleepableReplica
from tests.support.servers.paper_fleet import PaperClient


def sleepable():
    client = PaperClient()
    client.is_ready = True
    return SleepableReplica(client), client


def test_a_reserve_that_wakes_already_is_sent_to_sleep_again():
    replica, client = sleepable()
    replica.reserve()
    client.tell(asleep=True)
    replica.release()
    replica.reserve()
    assert client.orders == [True, False, True]


def test_a_reserve_that_sleeps_gets_no_second_order():
    replica, client = sleepable()
    replica.reserve()
    client.tell(asleep=True)
    replica.reserve()
    assert client.orders == [True]
