import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.engine.scheduler.batch_limit import BatchLimit

OBJECTIVE_S = 0.05


class Plant:
    """A machine whose steps take longer the more sequences run, with more waiting than it can ever run."""

    def __init__(self, limit, *, fixed_s, sequence_s, noise=0.0, stalls=0.0, seed=0, demand=10_000):
        self.limit, self.fixed_s, self.sequence_s = limit, fixed_s, sequence_s
        self.noise, self.stalls, self.demand = noise, stalls, demand
        self.rng = random.Random(seed)
        self.limits = []

    def run(self, steps):
        for _ in range(steps):
            running = min(self.limit.limit, self.demand)
            seconds = self.fixed_s + self.sequence_s * running
            seconds *= self.rng.uniform(1 - self.noise, 1 + self.noise)
            seconds += 0.2 * (self.rng.random() < self.stalls)
            self.limit.record(seconds, running, prefill_s=0.0, running=running, waiting=self.demand - running)
            self.limits.append(self.limit.limit)
        return self


def changes(limits):
    return sum(before != after for before, after in pairwise(limits))


def make(least=1, most=128):
    return BatchLimit(OBJECTIVE_S, least=least, most=most)


def test_without_an_objective_the_limit_is_the_most():
    limit = BatchLimit(None, least=1, most=64)
    Plant(limit, fixed_s=10.0, sequence_s=1.0).run(1000)
    assert limit.limit == 64


def test_it_settles_where_the_objective_holds():
    # 0.01 + 0.001 n: 40 sequences meet the objective exactly, 30 take 0.8 of it.
    plant = Plant(make(), fixed_s=0.01, sequence_s=0.001, noise=0.02).run(5000)
    assert all(28 <= limit <= 39 for limit in plant.limits[1500:])


def test_a_limit_that_is_too_low_rises_to_where_it_pays():
    limit = make()
    Plant(limit, fixed_s=0.01, sequence_s=0.01).run(2000)
    assert limit.limit <= 4
    Plant(limit, fixed_s=0.01, sequence_s=0.0002).run(20_000)
    assert limit.limit == 128


def test_noise_does_not_make_it_swing():
    plant = Plant(make(), fixed_s=0.01, sequence_s=0.001, noise=0.15, stalls=0.02).run(40_000)
    settled = plant.limits[10_000:]
    assert changes(settled) <= 20
    assert max(settled) - min(settled) <= 12


def test_rare_stalls_alone_do_not_lower_it():
    plant = Plant(make(most=20), fixed_s=0.01, sequence_s=0.001, stalls=0.01).run(10_000)
    assert plant.limit.limit == 20


def test_what_fewer_sequences_would_not_cure_does_not_lower_it_to_nothing():
    plant = Plant(make(), fixed_s=0.01, sequence_s=0.001, noise=0.1, stalls=0.08).run(20_000)
    assert min(plant.limits) >= 10


def test_prefill_is_not_held_against_the_batch():
    limit = make()
    for _ in range(1000):
        limit.record(0.06, 8, prefill_s=0.04, running=8, waiting=0)
    assert limit.limit == 128


def test_it_does_not_rise_while_nobody_waits_or_the_batch_is_not_full():
    limit = make()
    Plant(limit, fixed_s=0.01, sequence_s=0.01).run(500)
    low = limit.limit
    Plant(limit, fixed_s=0.001, sequence_s=0.0, demand=low).run(5000)
    Plant(limit, fixed_s=0.001, sequence_s=0.0, demand=1).run(5000)
    assert limit.limit == low


def test_it_falls_from_what_really_runs():
    limit = make()
    Plant(limit, fixed_s=0.06, sequence_s=0.0, demand=10).run(128)
    assert limit.limit < 10


def test_it_does_not_fall_again_before_a_fall_has_shown():
    limit = make(most=64)
    for _ in range(64):
        limit.record(0.1, 64, prefill_s=0.0, running=64, waiting=9)
    fallen = limit.limit
    assert 28 <= fallen <= 34
    for running in range(64, fallen, -1):
        for _ in range(20):
            limit.record(0.1, running, prefill_s=0.0, running=running, waiting=9)
    assert limit.limit == fallen


def test_even_the_slowest_machine_runs_the_least():
    limit = make(least=3)
    Plant(limit, fixed_s=1.0, sequence_s=0.1).run(5000)
    assert limit.limit == 3


@pytest.mark.parametrize(("least", "most"), [(0, 4), (5, 4)])
def test_rails_must_make_sense(least, most):
    with pytest.raises(ValueError, match="1 <= least <= most"):
        BatchLimit(OBJECTIVE_S, least=least, most=most)


@settings(max_examples=50, deadline=None)
@given(
    rails=st.tuples(st.integers(1, 40), st.integers(0, 200)),
    seed=st.integers(),
    demand=st.integers(1, 300),
)
def test_it_stays_between_its_rails_whatever_it_sees(rails, seed, demand):
    rng = random.Random(seed)
    least, most = rails[0], sum(rails)
    limit = BatchLimit(OBJECTIVE_S, least=least, most=most)
    for _ in range(1000):
        running = min(limit.limit, demand)
        seconds = rng.choice([0.0, 0.01, 0.04, 0.049, 0.06, 0.5])
        decodes = rng.randint(0, running)
        limit.record(seconds, decodes, prefill_s=rng.uniform(0, 0.1), running=running, waiting=demand - running)
        assert least <= limit.limit <= most


@settings(max_examples=25, deadline=None)
@given(
    fixed_s=st.floats(0.001, 0.03),
    sequence_s=st.floats(0.0001, 0.01),
    noise=st.floats(0, 0.2),
    stalls=st.floats(0, 0.02),
    seed=st.integers(),
)
def test_it_keeps_the_objective_and_calms_down_on_any_machine(fixed_s, sequence_s, noise, stalls, seed):
    plant = Plant(make(), fixed_s=fixed_s, sequence_s=sequence_s, noise=noise, stalls=stalls, seed=seed).run(12_000)
    settled = plant.limits[6000:]
    assert changes(settled) <= 24
    over = sum(fixed_s + sequence_s * limit > OBJECTIVE_S for limit in settled if limit > 1)
    assert over <= 0.05 * len(settled)
