"""Engines that say nothing any more, beside others that do: what is believed of their load."""

import pytest

from maitred.dispatch.config import DispatchConfig, ReportsConfig
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.metrics import dispatch_snapshot
from tests.support.dispatchers import Endpoint, SaidReplica, errand

BEGAN_S = 1_000_000.0


def floor_of(count=3, **reports):
    replicas = [SaidReplica() for _ in range(count)]
    posts = [Endpoint(f"r{number}", replica) for number, replica in enumerate(replicas)]
    floor = DispatchCore(posts, DispatchConfig(headroom=0.0, reports=ReportsConfig(**reports)))
    floor.refresh(BEGAN_S)
    return floor, replicas


def believed(floor, now_s):
    floor.refresh(now_s)
    return [word.prompt_tokens for word in floor.reports.estimate_loads(floor.endpoint_states, 100.0, now_s)]


def test_an_engine_that_is_silent_with_work_to_do_is_judged_by_its_peers():
    floor, (silent, one, other) = floor_of(fresh_s=2.0, half_s=5.0)
    for replica, tokens in ((silent, 9_000), (one, 100), (other, 300)):
        replica.say(running=1, waiting=1, waiting_prompt_tokens=tokens)
    assert believed(floor, BEGAN_S) == [9_000, 100, 300]
    for now_s in (BEGAN_S + 2.0, BEGAN_S + 7.0, BEGAN_S + 60.0):
        for replica, tokens in ((one, 100), (other, 300)):
            replica.say(running=1 + int(now_s) % 7, waiting_prompt_tokens=tokens)
        if now_s == BEGAN_S + 2.0:
            assert believed(floor, now_s) == [9_000, 100, 300], "a long step is no reason to doubt"
        elif now_s == BEGAN_S + 7.0:
            half = believed(floor, now_s)[0]
            assert half == pytest.approx(9_000 / 2 + (9_000 / 2 + 400) / 2.5 / 2)
    assert believed(floor, now_s)[0] == pytest.approx(200, abs=10)
    trust = dispatch_snapshot(floor, now_s).trust
    assert trust["r0"] < 0.001
    assert trust["r1"] == trust["r2"] == 1.0


def test_an_engine_with_nothing_to_do_owes_no_report():
    floor, replicas = floor_of(fresh_s=2.0, half_s=5.0)
    replicas[1].say(running=1, waiting=1, waiting_prompt_tokens=400)
    assert believed(floor, BEGAN_S) == [0, 400, 0]
    assert dispatch_snapshot(floor, BEGAN_S + 3_600.0).trust["r0"] == 1.0


def test_what_was_sent_there_is_believed_whatever_its_peers_do():
    floor, replicas = floor_of(2, fresh_s=2.0, half_s=5.0)
    tickets = []
    for number in range(4):
        ticket = floor.new_entry(errand(number, tokens=200))
        floor.join(ticket, BEGAN_S)
        tickets += floor.dispatch_ready(BEGAN_S)
        ticket.allocation.endpoint_state.endpoint.replica.submit()
        floor.on_submitted(ticket)
    assert len(tickets) == 4
    for replica in replicas:
        replica.say(running=1, waiting=1, waiting_prompt_tokens=400)
    replicas[1].say(running=1, waiting_prompt_tokens=0)
    assert believed(floor, BEGAN_S + 60.0)[0] >= 200
    late_s = BEGAN_S + 120.0
    replicas[1].say(running=2)
    assert believed(floor, late_s)[0] == pytest.approx(400), "two prompts that it has read and not answered"
    for ticket in tickets:
        floor.charge_tokens(ticket, 200, 0, 1)
    assert believed(floor, late_s)[0] < 1, "they have been answered, and its peer is idle"
    for ticket in tickets:
        floor.leave(ticket, late_s, finished=True)
    assert all(station.credits.unanswered_tokens == 0 for station in floor.endpoint_states)
