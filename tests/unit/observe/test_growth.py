"""Leaks of the gateway and of engines, followed by a clock that the test turns."""

from dataclasses import replace

import pytest

from maitred.core.replica import LoadReport, ProcessState
from maitred.observe.growth import GrowthWatch
from maitred.observe.metrics.engines import EngineState
from tests.support.clock import FakeClock

HOURLY = 3600 / 120


class World:
    def __init__(self):
        self.clock = FakeClock()
        self.held = {"memory_bytes": 1e8, "tasks": 5.0}
        self.engine = EngineState(True, 0, LoadReport(process=ProcessState(resident_bytes=1 << 30)), None)
        self.watch = GrowthWatch(lambda: 3, lambda: {("m", "r"): self.engine}, self.clock, lambda: dict(self.held))

    def pass_looks(self, count, *, leak=0.0):
        for _ in range(count):
            self.watch.sample()
            self.clock.now_s += 120.0
            self.held["memory_bytes"] += leak

    def shown(self, name, process="gateway", resource="memory_bytes"):
        (family,) = (family for family in self.watch.collect() if family.name == name)
        found = [sample.value for sample in family.samples if set(sample.labels.values()) == {process, resource}]
        return found[0] if found else None


def test_a_leak_is_reported_per_hour():
    world = World()
    world.pass_looks(30, leak=1e6)
    assert world.shown("maitred_growth_per_hour") == pytest.approx(1e6 * HOURLY)
    assert world.shown("maitred_growth_trend") == 1.0
    assert world.shown("maitred_growth_level") == 1e8 + 29e6
    assert world.shown("maitred_growth_per_hour", resource="tasks") == 0
    assert world.shown("maitred_growth_per_hour", "m/r") == 0


def test_a_process_may_fill_its_caches_first():
    world = World()
    world.pass_looks(5, leak=1e7)
    world.pass_looks(30)
    assert world.shown("maitred_growth_per_hour") == 0


def test_nothing_is_reported_before_there_are_enough_samples():
    world = World()
    world.pass_looks(8, leak=1e6)
    assert world.shown("maitred_growth_level") is not None
    assert world.shown("maitred_growth_per_hour") is None


def test_an_engine_that_was_started_again_begins_anew():
    world = World()
    world.pass_looks(20)
    assert world.shown("maitred_growth_trend", "m/r") == 0
    world.engine = replace(world.engine, restarts=1)
    world.pass_looks(1)
    assert world.shown("maitred_growth_trend", "m/r") is None


def test_what_leaked_long_ago_is_forgotten():
    world = World()
    world.pass_looks(40, leak=1e6)
    world.pass_looks(61)
    assert world.shown("maitred_growth_per_hour") == 0
