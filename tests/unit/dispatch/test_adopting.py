"""A dispatcher gets other settings and replicas while requests wait and run: none is lost, and no credits are kept."""

import asyncio
import random
from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace

from maitred.core.flow import PriorityClass
from maitred.dispatch.config import DispatchConfig, TenantPoolConfig
from maitred.dispatch.request import Endpoint
from maitred.fairness.config import QueueOrderConfig
from tests.support.dispatchers import DispatchSetup, ScriptedReplica
from tests.unit.dispatch.test_dispatcher import QueuedCaller, turn

PLAIN = DispatchConfig(headroom=0.0, unknown_output_share=1.0)
ORGS = ("acme", "bolt", "crow")


def reconfigure(setup, config=PLAIN, endpoints=None):
    setup.dispatcher.reconfigure(
        endpoints or [endpoint_state.endpoint for endpoint_state in setup.core.endpoint_states], config, None
    )


def with_replica(endpoint, replica):
    return Endpoint(endpoint.name, replica, endpoint.reports_capacity, endpoint.admin_state)


async def test_waiting_requests_are_dispatched_in_order_of_arrival_under_the_new_settings():
    setup = DispatchSetup()
    async with AsyncExitStack() as running:
        for number in range(4):
            await running.enter_async_context(setup.enqueue(number))
        callers = [QueuedCaller(setup, number, org) for number, org in enumerate(("acme", "acme", "acme", "bolt"))]
        await turn()
        reconfigure(setup, replace(PLAIN, line=QueueOrderConfig(policy="fifo")))
        await turn()
        assert setup.core.waiting == 4
        assert [caller.entry.position().position for caller in callers] == [0, 1, 2, 3]
    await turn()
    assert [caller.endpoint.name for caller in callers] == ["replica-0"] * 4
    for caller in callers:
        await caller.go()
    setup.assert_empty()


async def test_a_removed_replica_gets_no_new_requests_and_finishes_its_own():
    setup = DispatchSetup()
    callers = [QueuedCaller(setup, number) for number in range(4)]
    await turn()
    other = ScriptedReplica()
    setup.dispatcher.reconfigure([Endpoint("new", other)], PLAIN, None)
    later = QueuedCaller(setup, 9)
    await turn()
    assert {caller.endpoint.name for caller in callers} == {"replica-0"}
    assert later.endpoint.name == "new"
    for caller in [*callers, later]:
        await caller.go()
        assert caller.error is None
    setup.assert_empty()
    assert callers[0].endpoint.admin_state.running == 0


async def test_a_request_that_waits_for_a_lost_replica_goes_to_the_new_one():
    setup = DispatchSetup()
    setup.replica.set_up(False)
    caller = QueuedCaller(setup)
    await turn()
    assert caller.endpoint is None
    setup.dispatcher.reconfigure([Endpoint("new", ScriptedReplica())], PLAIN, None)
    await turn()
    assert caller.endpoint.name == "new"
    await caller.go()


async def test_a_replica_that_is_configured_anew_keeps_its_credits():
    setup = DispatchSetup(reports_capacity=False)
    callers = [QueuedCaller(setup, number) for number in range(3)]
    await turn()
    (endpoint_state,) = setup.core.endpoint_states
    held = endpoint_state.credits.request_count
    assert held
    setup.dispatcher.reconfigure([with_replica(endpoint_state.endpoint, ScriptedReplica())], PLAIN, None)
    assert setup.core.endpoint_states == [endpoint_state]
    assert endpoint_state.credits.request_count == held
    for caller in callers:
        await caller.go()
    setup.assert_empty()


async def test_a_replica_has_one_listener_however_often_it_is_reconfigured():
    setup = DispatchSetup()
    for _ in range(3):
        setup.dispatcher.reconfigure([with_replica(setup.core.endpoint_states[0].endpoint, setup.replica)], PLAIN, None)
    assert len(setup.replica._listeners) == 1


async def test_a_lower_queue_limit_rejects_new_requests_and_keeps_those_that_wait():
    setup = DispatchSetup()
    callers = [QueuedCaller(setup, number) for number in range(8)]
    await turn()
    reconfigure(setup, replace(PLAIN, max_waiting={PriorityClass.STANDARD: 1}))
    with pytest.raises(Exception, match="1 requests of class standard wait already"):
        setup.check(99)
    assert setup.core.waiting == 4
    for caller in callers:
        await caller.go()
        assert caller.error is None
    setup.assert_empty()


@pytest.mark.parametrize("seed", range(20))
async def test_after_any_changes_each_request_was_dispatched_once_and_nothing_is_held(seed):
    draw = random.Random(seed)
    setup = DispatchSetup(replicas=2)
    endpoints = [
        *(endpoint_state.endpoint for endpoint_state in setup.core.endpoint_states),
        Endpoint("replica-2", ScriptedReplica()),
    ]
    callers: list[QueuedCaller] = []
    for number in range(120):
        present = [caller for caller in callers if not caller.task.done()]
        match draw.choice(["come", "come", "go", "leave", "reload"]):
            case "come":
                callers.append(QueuedCaller(setup, number, draw.choice(ORGS), weight=draw.choice((1.0, 3.0))))
            case "go" if dispatched := [caller for caller in present if caller.endpoint is not None]:
                await draw.choice(dispatched).go()
            case "leave" if present:
                await draw.choice(present).cancel()
            case "reload":
                config = replace(
                    PLAIN,
                    line=QueueOrderConfig(policy=draw.choice(("fair", "fifo", "priority", "deficit"))),
                    reserved=draw.choice(({}, {"acme": 0.3})),
                    pools=draw.choice(({}, {"mine": TenantPoolConfig(tenants=["bolt"], share=0.4)})),
                    headroom=draw.choice((0.0, 0.1)),
                )
                reconfigure(setup, config, draw.sample(endpoints, draw.randint(1, 3)))
        await turn()
    reconfigure(setup, endpoints=endpoints)
    async with asyncio.timeout(300):
        await asyncio.gather(*(caller.go() for caller in callers if not caller.task.done()))
    assert [caller.error for caller in callers] == [None] * len(callers)
    setup.assert_empty()
