"""The counters in memory keep what all counters promise."""

from contextlib import asynccontextmanager

import pytest

from maitred.store.counters.memory import MemoryCounters
from maitred.testing.counters_conformance import CHECKS, CountersUnderTest, exercise_counters


class StoppedClock:
    def __init__(self):
        self.now_s = 1000.1

    def monotonic_s(self):
        return self.now_s

    def wall_s(self):
        return 1.7e9 + self.now_s


@asynccontextmanager
async def memory_counters():
    clock = StoppedClock()
    spent = {}
    asked = []

    async def spent_before(counters):
        asked.extend(counters)
        return {counter: spent[counter] for counter in counters if counter in spent}

    async def advance(seconds):
        clock.now_s += seconds

    yield CountersUnderTest(MemoryCounters(clock, spent_before), advance, clock.wall_s, spent, asked)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_memory_counters(check):
    await exercise_counters(memory_counters, check)
