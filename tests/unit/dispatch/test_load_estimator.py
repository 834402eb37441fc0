"""Engines that say nothing any more, beside others that do: what is believed of their load."""

import pytest

from maitred.dispatch.config import DispatchConfig, ReportsConfig
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.metrics import dispatch_snapshot
from tests.support.dispatchers import Endpoint, ScriptedReplica, make_dispatch_request

BEGAN_S = 1_000_000.0


def make_core(count=3, **reports):
    replicas = [ScriptedReplica() for _ in range(count)]
    endpoints = [Endpoint(f"r{number}", replica) for number, replica in enumerate(replicas)]
    core = DispatchCore(endpoints, DispatchConfig(headroom=0.0, reports=ReportsConfig(**reports)))
    core.refresh(BEGAN_S)
    return core, replicas


def estimated_loads(core, now_s):
    core.refresh(now_s)
    return [
        estimate.prompt_tokens for estimate in core.load_estimator.estimate_loads(core.endpoint_states, 100.0, now_s)
    ]


def test_the_load_of_a_busy_engine_without_reports_is_estimated_from_its_peers():
    core, (silent, one, other) = make_core(fresh_s=2.0, half_s=5.0)
    for replica, tokens in ((silent, 9_000), (one, 100), (other, 300)):
        replica.say(running=1, waiting=1, waiting_prompt_tokens=tokens)
    assert estimated_loads(core, BEGAN_S) == [9_000, 100, 300]
    for now_s in (BEGAN_S + 2.0, BEGAN_S + 7.0, BEGAN_S + 60.0):
        for replica, tokens in ((one, 100), (other, 300)):
            replica.say(running=1 + int(now_s) % 7, waiting_prompt_tokens=tokens)
        if now_s == BEGAN_S + 2.0:
            assert estimated_loads(core, now_s) == [9_000, 100, 300], "a long step is no reason to doubt"
        elif now_s == BEGAN_S + 7.0:
            half = estimated_loads(core, now_s)[0]
            assert half == pytest.approx(9_000 / 2 + (9_000 / 2 + 400) / 2.5 / 2)
    assert estimated_loads(core, now_s)[0] == pytest.approx(200, abs=10)
    trust = dispatch_snapshot(core, now_s).trust
    assert trust["r0"] < 0.001
    assert trust["r1"] == trust["r2"] == 1.0


def test_the_last_report_of_an_idle_engine_stays_trusted():
    core, replicas = make_core(fresh_s=2.0, half_s=5.0)
    replicas[1].say(running=1, waiting=1, waiting_prompt_tokens=400)
    assert estimated_loads(core, BEGAN_S) == [0, 400, 0]
    assert dispatch_snapshot(core, BEGAN_S + 3_600.0).trust["r0"] == 1.0


def test_requests_that_were_sent_to_a_replica_count_whatever_its_peers_report():
    core, replicas = make_core(2, fresh_s=2.0, half_s=5.0)
    dispatched = []
    for number in range(4):
        queued = core.new_entry(make_dispatch_request(number, tokens=200))
        core.join(queued, BEGAN_S)
        dispatched += core.run_dispatch_pass(BEGAN_S)
        queued.allocation.endpoint_state.endpoint.replica.submit()
        core.on_submitted(queued)
    assert len(dispatched) == 4
    for replica in replicas:
        replica.say(running=1, waiting=1, waiting_prompt_tokens=400)
    replicas[1].say(running=1, waiting_prompt_tokens=0)
    assert estimated_loads(core, BEGAN_S + 60.0)[0] >= 200
    late_s = BEGAN_S + 120.0
    replicas[1].say(running=2)
    assert estimated_loads(core, late_s)[0] == pytest.approx(400), "two prompts that it has read and not answered"
    for queued in dispatched:
        core.charge_tokens(queued, 200, 0, 1)
    assert estimated_loads(core, late_s)[0] < 1, "they have been answered, and its peer is idle"
    for queued in dispatched:
        core.leave(queued, late_s, finished=True)
    assert all(endpoint_state.credits.unanswered_tokens == 0 for endpoint_state in core.endpoint_states)
