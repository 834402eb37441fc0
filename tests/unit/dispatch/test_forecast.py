"""A request is forecast once while nothing changes, and anew when something has."""

import pytest
from msgspec.structs import replace

from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.errand import Post
from maitred.dispatch.floor import Floor
from tests.dispatch_desk import EMPTY, SaidReplica, errand


@pytest.fixture
def replica():
    return SaidReplica()


@pytest.fixture
def floor(replica):
    return Floor([Post("local", replica)], DispatchConfig())


def forecast(floor, now_s, **fields):
    return floor.forecaster.of(floor.ticket(errand(**fields)), floor.refresh(now_s), now_s)


def test_who_asks_and_joins_is_told_the_same(floor):
    assert forecast(floor, 0.001) is forecast(floor, 0.002)


def test_another_request_or_a_later_one_is_not(floor):
    first = forecast(floor, 0.001)
    assert forecast(floor, 0.002, max_tokens=11) is not first
    assert forecast(floor, 0.002) is not first
    assert forecast(floor, 0.1) is not forecast(floor, 0.2)


def test_after_a_report_or_when_another_has_joined_it_is_not(floor, replica):
    first = forecast(floor, 0.001)
    replica._load = replace(EMPTY, free_sequences=1)
    second = forecast(floor, 0.001)
    assert second is not first
    floor.join(floor.ticket(errand("another")), 0.001)
    third = forecast(floor, 0.001)
    assert third is not second
    assert third.ahead.entries == 1


def test_who_waits_is_always_looked_at_anew(floor, replica):
    replica._load = replace(EMPTY, free_sequences=0)
    tickets = [floor.ticket(errand(name)) for name in ("one", "two")]
    for ticket in tickets:
        floor.join(ticket, 0.0)
    ready = floor.refresh(0.0)
    places = [floor.forecaster.of(ticket, ready, 0.0).ahead.entries for ticket in tickets]
    assert places == [0, 1]
