"""The manager of models on demand with pools of paper: what it asks for, and what it learns of what became of it."""

import asyncio
import threading
from contextlib import asynccontextmanager, suppress

import pytest

from maitred.core.errors import ModelLoadFailed, ModelLoading
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.dispatcher import Dispatcher
from maitred.fleet.policy.model_residency import ModelResidency, ResidencyPhase
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.policy.residency import ResidencyPolicy
from maitred.fleet.pool import ReplicaPool
from maitred.fleet.residency import manager
from maitred.fleet.residency.manager import ModelManager, OnDemandModel
from maitred.scaling.replica_status import ReplicaPhase
from maitred.scaling.startup_times import StartKind, StartupTimes
from tests.support.clock import FakeClock
from tests.support.dispatchers import enter, leave, make_dispatch_request
from tests.support.servers.paper_fleet import PaperBackend

BYTES = 1 << 30


class Machine:
    """Two models and memory for one of them, with engines on paper."""

    def __init__(self):
        self.clock = FakeClock()
        residents = [ModelResidency(name, BYTES, load_s=4.0) for name in "ab"]
        self.policy = ResidencyPolicy(residents, BYTES, 1.0)
        self.manager = ModelManager(self.policy, self.clock)
        self.backends, self.queues = {}, {}
        for name in "ab":
            self.backends[name] = backend = PaperBackend(self.clock, max_replicas=1)
            pool = ReplicaPool(
                backend,
                DesiredReplicas(0),
                StartupTimes({StartKind.WEIGHTS_CACHED: 4.0}),
                self.clock,
                lambda name=name: self.manager.refusal(name),
            )
            queue = Dispatcher(name, pool.endpoints(), DispatchConfig(), self.clock)
            pool.on_endpoints(
                lambda pool=pool, queue=queue: queue.reconfigure(pool.endpoints(), DispatchConfig(), None)
            )
            self.manager.add_model(OnDemandModel(name, pool, queue))
            self.queues[name] = queue

    @property
    def phases(self):
        return [self.policy[name].phase for name in "ab"]

    def client(self, name):
        return self.backends[name].there["r0"].engine.client

    def ask(self, name):
        entry = self.queues[name].enqueue(make_dispatch_request(arrived_s=self.clock.now_s))
        enter(entry)
        return entry

    async def load(self, name):
        self.manager.order_load(name)
        await settle()
        self.clock.now_s += 3.0
        self.backends[name].become("r0", ReplicaPhase.SERVING)
        await settle()
        assert self.policy[name].phase is ResidencyPhase.LOADED


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def managed():
    machine = Machine()
    task = asyncio.create_task(machine.manager.run())
    try:
        await settle()
        yield machine
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_model_leaves_its_memory_to_another_after_its_last_answer():
    async with managed() as machine:
        await machine.load("a")
        answer = machine.ask("a")
        machine.clock.now_s += 60.0
        machine.ask("b")
        await settle()
        assert machine.phases == [ResidencyPhase.LOADED, ResidencyPhase.UNLOADED]
        waiting = machine.ask("a")
        assert machine.queues["a"].core.waiting == 1, "it gets nothing new"
        machine.clock.now_s += 1.0
        leave(answer)
        await settle()
        assert machine.backends["a"].there["r0"].phase is ReplicaPhase.DRAINING
        assert machine.phases == [ResidencyPhase.UNLOADING, ResidencyPhase.UNLOADED]
        machine.backends["a"].vanish("r0")
        await settle()
        assert machine.phases == [ResidencyPhase.UNLOADED, ResidencyPhase.LOADING]
        assert machine.manager.models["a"].unloads == 1
        leave(waiting)


async def test_failed_loads_are_tried_again_later_each_time():
    async with managed() as machine:
        waits = []
        for _ in range(3):
            machine.ask("a")
            await settle()
            machine.backends["a"].become("r0", ReplicaPhase.FAILED)
            await settle()
            assert isinstance(machine.manager.refusal("a"), ModelLoading), "its process is not gone yet"
            machine.backends["a"].vanish("r0")
            await settle()
            refusal = machine.manager.refusal("a")
            assert isinstance(refusal, ModelLoadFailed)
            assert machine.queues["a"].core.waiting == 0, "who waited got the error"
            waits.append(refusal.retry_after_s)
            machine.clock.now_s += refusal.retry_after_s
        assert waits == pytest.approx([2.0, 4.0, 8.0])
        await machine.load("a")
        model = machine.manager.models["a"]
        assert (model.failures, model.failures_in_a_row, model.loads, model.total_load_s) == (3, 0, 1, 3.0)


async def test_requests_wait_for_a_loaded_model_whose_engine_is_started_again():
    async with managed() as machine:
        await machine.load("a")
        machine.backends["a"].become("r0", ReplicaPhase.FAILED)
        await settle()
        assert machine.phases[0] is ResidencyPhase.LOADED
        refusal = machine.manager.refusal("a")
        assert isinstance(refusal, ModelLoading)
        assert refusal.retry_after_s == 3.0, "as long as its load took"


@pytest.mark.parametrize("lost_after", ["order", "sleep"])
async def test_one_that_is_lost_while_it_sleeps_or_falls_asleep_is_ended(lost_after):
    async with managed() as machine:
        await machine.load("a")
        machine.manager.order_sleep("a")
        await settle()
        assert machine.client("a").orders == [True]
        assert machine.policy.used_bytes == BYTES, "until it sleeps"
        if lost_after == "sleep":
            machine.client("a").tell(asleep=True)
            await settle()
            assert (machine.policy["a"].is_asleep, machine.policy.used_bytes) == (True, 0)
            assert machine.manager.models["a"].sleeps == 1
        machine.backends["a"].become("r0", ReplicaPhase.FAILED)
        await settle()
        assert machine.backends["a"].there["r0"].phase is ReplicaPhase.DRAINING
        machine.backends["a"].vanish("r0")
        await settle()
        assert machine.phases[0] is ResidencyPhase.UNLOADED
        assert not machine.policy["a"].is_asleep


async def test_one_that_sleeps_is_woken_for_a_request():
    async with managed() as machine:
        await machine.load("a")
        machine.manager.order_sleep("a")
        await settle()
        machine.client("a").tell(asleep=True)
        await settle()
        machine.ask("a")
        await settle()
        assert machine.client("a").orders == [True, False]
        machine.clock.now_s += 0.5
        machine.client("a").tell(asleep=False)
        await settle()
        model = machine.manager.models["a"]
        assert (machine.phases[0], model.loads, model.wakes) == (ResidencyPhase.LOADED, 1, 1)
        assert machine.policy["a"].wake_time.seconds == 0.5
        assert machine.queues["a"].core.running == 1


async def test_a_decision_that_fails_is_logged_and_made_again(monkeypatch, caplog):
    monkeypatch.setattr(manager, "_IDLE_TICK_S", 0.0)
    async with managed() as machine:
        decide, faults = machine.policy.decide, [ValueError("odd numbers"), ZeroDivisionError("no turn")]

        def fail_first(now_s, demands):
            if faults:
                raise faults.pop()
            return decide(now_s, demands)

        monkeypatch.setattr(machine.policy, "decide", fail_first)
        await machine.load("a")
        assert [str(record.exc_info[1]) for record in caplog.records] == ["no turn", "odd numbers"]


async def test_an_error_in_the_record_of_a_load_reaches_neither_its_engine_nor_other_models(monkeypatch, caplog):
    async with managed() as machine:
        machine.ask("a")
        await settle()
        with monkeypatch.context() as broken:
            broken.setattr(machine.policy, "on_loaded", lambda *arguments: 1 / 0)
            machine.backends["a"].become("r0", ReplicaPhase.SERVING)
            await settle()
        assert "What has become of a could not be recorded" in caplog.text
        machine.manager.models["a"].pool.refresh()
        machine.backends["a"].become("r0", ReplicaPhase.SERVING)
        await settle()
        assert machine.policy["a"].phase is ResidencyPhase.LOADED, "at the next change"


async def test_memory_is_measured_again_after_a_failure_and_processes_are_looked_up_in_the_event_loop(
    monkeypatch, caplog
):
    looked_up, faults = [], [OSError("no /proc")]

    def pids_of(engines):
        looked_up.append(threading.current_thread())
        return [7]

    def measure(pid):
        if faults:
            raise faults.pop()
        return BYTES // 2

    async with managed() as machine:
        await machine.load("a")
        monkeypatch.setattr(manager, "engine_pids", pids_of)
        monkeypatch.setattr(manager, "process_memory_bytes", measure)
        monkeypatch.setattr(manager, "_MEASURE_S", 0.0)
        task = asyncio.create_task(machine.manager._measure())
        while not machine.manager.models["a"].measured_bytes:
            assert not task.done()
            await asyncio.sleep(0)
        task.cancel()
    assert "The memory of a could not be measured" in caplog.text
    assert set(looked_up) == {threading.main_thread()}


async def test_a_model_that_does_not_fit_any_more_is_refused_with_the_numbers_until_it_does():
    async with managed() as machine:
        await machine.load("a")
        machine.policy["a"].on_measured(2 * BYTES, machine.clock.monotonic_s())
        machine.manager.order_load("b")
        await settle()
        assert machine.backends["a"].there["r0"].phase is ReplicaPhase.DRAINING
        machine.backends["a"].vanish("r0")
        waiting = machine.ask("a")
        await settle()
        assert machine.phases == [ResidencyPhase.UNLOADED, ResidencyPhase.LOADING]
        assert machine.queues["a"].core.waiting == 0
        with pytest.raises(ModelLoadFailed, match=r"takes 2,048 MiB, and residency.memory_bytes leaves 1,024 MiB"):
            await waiting.wait_dispatched()
        machine.policy.budget_bytes *= 2
        machine.ask("a")
        await settle()
        assert isinstance(machine.manager.refusal("a"), ModelLoading)
        assert machine.queues["a"].core.waiting == 1
