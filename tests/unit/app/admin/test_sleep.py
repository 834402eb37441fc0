"""What wakes a resident model that sleeps, and what its sleep costs when it is awake."""

import asyncio

from maitred.app.admin.sleep import SleepableModelAdmin
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.dispatcher import Dispatcher
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.pool import ReplicaPool
from maitred.scaling.startup_times import StartupTimes
from maitred.wire.admin.responses import SleepState
from tests.support.clock import FakeClock
from tests.support.dispatchers import EMPTY, enter, leave, make_dispatch_request
from tests.support.servers.paper_fleet import PaperBackend


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_request_that_waits_wakes_the_model_and_one_that_is_awake_is_not_watched():
    clock = FakeClock()
    backend = PaperBackend(clock, found=["r0"])
    client = backend.there["r0"].engine.client
    client.report = EMPTY
    async with ReplicaPool(backend, DesiredReplicas(1), StartupTimes({}), clock) as pool:
        dispatcher = Dispatcher("m", pool.endpoints(), DispatchConfig(), clock)
        pool.on_endpoints(lambda: dispatcher.reconfigure(pool.endpoints(), DispatchConfig(), None))
        admin = SleepableModelAdmin(None, {"m": (dispatcher, pool)})
        assert dispatcher._dispatch_listener is None
        entries = [dispatcher.enqueue(make_dispatch_request(number, arrived_s=clock.now_s)) for number in range(3)]
        enter(entries[0])
        assert admin.sleep("m").state is SleepState.DRAINING
        enter(entries[1])
        await settle()
        assert (dispatcher.core.running, client.orders) == (2, []), "it serves again before it sleeps"
        leave(entries[0])
        leave(entries[1])
        admin.sleep("m")
        await settle()
        client.tell(asleep=True)
        await settle()
        assert admin._resident_body("m").state is SleepState.ASLEEP
        enter(entries[2])
        await settle()
        assert client.orders == [True, False]
        assert admin._resident_body("m").state is SleepState.WAKING
        client.tell(asleep=False)
        await settle()
        assert admin._resident_body("m").state is SleepState.AWAKE
        assert dispatcher.core.running == 1
        assert dispatcher._dispatch_listener is None
