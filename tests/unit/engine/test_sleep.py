"""An engine that sleeps, with arithmetic in place of a model."""

import threading

import pytest

from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.sleep import SleepController
from tests.support.clock import FakeClock
from tests.unit.engine.test_engine import Bench


class FakeMemory:
    """Notes what is done to it; waking takes until `up` is set."""

    def __init__(self, pool=None, fault=None):
        self.present = True
        self.up = threading.Event()
        self.up.set()
        self.pool = pool
        self.fault = fault

    def release_memory(self):
        self.present = False
        if self.pool is not None:
            self.pool.clear()

    def restore_memory(self):
        self.up.wait(10)
        if self.fault is not None:
            raise self.fault
        self.present = True


class Sleepy(Bench):
    """An engine whose model can be away, and says so when it is asked to compute without it."""

    def __init__(self):
        super().__init__()
        pool = self.engine._scheduler.pool
        self.memory = FakeMemory(pool)
        self.engine._sleep_controller = SleepController(self.memory, self.clock, 5.0)
        execute = self.runner.execute

        def computed(plan):
            assert self.memory.present
            return execute(plan)

        self.runner.execute = computed

    def turns(self, *, most=10_000):
        """As the server's loop makes them, until there is nothing to do."""
        outputs = []
        for _ in range(most):
            patience_s = self.engine.max_idle_s()
            if patience_s is None:
                return outputs
            if patience_s == 0:
                outputs += self.step()
            else:
                threading.Event().wait(patience_s)
        raise AssertionError("it never rests")


def test_it_sleeps_once_nothing_runs_and_forgets_what_it_had_computed():
    bench = Sleepy()
    bench.submit("a", prompt=9)
    bench.step()
    bench.engine.set_asleep(asleep=True)
    assert not bench.engine.load().asleep
    assert bench.turns()[-1][1].finish is not None
    assert bench.engine.load().asleep
    assert not bench.memory.present
    news = bench.engine.block_update()
    assert news.stored == b""
    assert bench.engine.block_update(whole=True).stored == b""
    bench.check_idle()


def test_a_request_wakes_it_and_is_answered_as_before():
    bench = Sleepy()
    bench.submit("a", prompt=9)
    before = [delta.tokens for _, delta in bench.turns()]
    bench.engine.set_asleep(asleep=True)
    bench.turns()
    bench.memory.up.clear()
    bench.submit("b", prompt=9)
    assert bench.engine.max_idle_s() == 0
    assert bench.step() == []
    assert bench.engine.max_idle_s() > 0, "it waits for its model, and looks at its sockets meanwhile"
    assert bench.engine.load().asleep
    bench.clock.now_s += 2.0
    bench.memory.up.set()
    after = bench.turns()
    assert [delta.tokens for _, delta in after] == before
    assert after[0][1].cached_tokens == 0
    load = bench.engine.load()
    assert not load.asleep
    assert load.wakes_in_s == 2.0
    bench.check_idle()


def test_it_can_be_woken_by_word_and_one_that_is_drowsy_stays_awake():
    bench = Sleepy()
    bench.submit("a")
    bench.engine.set_asleep(asleep=True)
    bench.engine.set_asleep(asleep=False)
    bench.turns()
    assert bench.memory.present
    bench.engine.set_asleep(asleep=True)
    bench.turns()
    bench.engine.set_asleep(asleep=False)
    bench.turns()
    assert bench.memory.present
    assert not bench.engine.load().asleep


def test_one_that_cannot_wake_dies_of_it():
    controller = SleepController(FakeMemory(fault=MemoryError("no room")), FakeClock(), 1.0)
    controller.order(asleep=True)
    assert not controller.step(occupied=False)
    controller.step(occupied=True)
    while controller.max_idle_s(occupied=True):
        threading.Event().wait(0.001)
    with pytest.raises(MemoryError):
        controller.step(occupied=True)


def test_a_request_that_ends_while_it_wakes_leaves_it_awake_and_empty():
    bench = Sleepy()
    bench.engine.set_asleep(asleep=True)
    bench.turns()
    bench.engine.submit("owner", EngineRequest("a", [1, 2], SamplingParams(max_tokens=3, seed=0)))
    bench.step()
    bench.engine.cancel_owner("owner")
    bench.turns()
    assert bench.memory.present
    bench.check_idle()
