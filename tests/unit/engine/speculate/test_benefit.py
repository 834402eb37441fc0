"""Whether drafts pay, for machines of different shapes."""

import random

import pytest

from maitred.core.replica import StepTimes
from maitred.engine.scheduler.step_times import StepMeter, StepWork
from maitred.engine.speculate.acceptance import Acceptance
from maitred.engine.speculate.benefit import SpeculationBenefit


def memory_bound(work):
    """Eight rows cost hardly more than one, and then every one counts."""
    return 0.1 + 0.01 * max(0, work.decodes + work.drafts - 8)


def compute_bound(work):
    """Every row costs the same."""
    return 0.002 + 0.01 * (work.decodes + work.drafts)


def cliff(work):
    """The second row costs as much as the first; those after it next to nothing."""
    return 0.1 if work.decodes + work.drafts == 1 else 0.19 + 0.001 * work.drafts


class Machine:
    """Steps of a machine, and what is learnt from them."""

    def __init__(self, seconds, seed=0):
        self.seconds = seconds
        self.meter = StepMeter()
        self.worth = SpeculationBenefit()
        self.draw = random.Random(seed)
        self.spent_s = 0.0
        self.tokens = 0.0
        self.rows = 0

    def run(self, decodes, acceptance, *, most=12, steps=1):
        for _ in range(steps):
            work = StepWork(decodes, 100 * decodes)
            gains, chance = [], 1.0
            for _ in range(most):
                chance *= acceptance
                gains += [chance] * decodes
            for place in range(1, len(gains)):
                gains[place] += gains[place - 1]
            self.rows = 0
            if self.worth.may_pay(work, len(gains), self.meter.times):
                self.rows = self.worth.rows(work, gains, self.meter.times)
            work = StepWork(decodes, 100 * decodes, drafts=self.rows)
            took_s = self.seconds(work)
            self.spent_s += took_s
            self.tokens += decodes + (gains[self.rows - 1] if self.rows else 0.0)
            noisy_s = took_s * self.draw.uniform(0.9, 1.1)
            self.worth.on_step_time(work, noisy_s, self.meter.times)
            self.meter.record(work, noisy_s)

    def gain(self, decodes):
        """Tokens per second, by what they are without drafts."""
        plain = decodes / self.seconds(StepWork(decodes, 100 * decodes))
        return self.tokens / self.spent_s / plain


def test_where_rows_cost_nothing_good_guesses_are_taken_whole():
    machine = Machine(memory_bound)
    machine.run(1, 0.95, steps=300)
    assert machine.rows >= 7
    assert machine.gain(1) > 3.5


@pytest.mark.parametrize("machine", [memory_bound, compute_bound, cliff])
@pytest.mark.parametrize("decodes", [1, 8, 64])
@pytest.mark.parametrize("acceptance", [0.02, 0.1, 0.5, 0.9])
def test_it_is_never_two_percent_slower_than_without(machine, decodes, acceptance):
    machine = Machine(machine)
    machine.run(decodes, acceptance, steps=2000)
    assert machine.gain(decodes) > 0.98


def test_in_a_full_batch_of_a_machine_that_computes_there_are_none():
    machine = Machine(compute_bound)
    machine.run(64, 0.9, steps=250)
    assert machine.gain(64) > 0.98
    machine.run(64, 0.9)
    assert machine.rows == 0


def test_the_number_goes_up_and_down_with_what_is_right():
    machine = Machine(memory_bound)
    machine.run(1, 0.9, steps=100)
    many = machine.rows
    machine.run(1, 0.02, steps=5)
    assert machine.rows == 0
    machine.run(1, 0.4, steps=5)
    assert 0 < machine.rows <= many


def test_before_anything_was_measured_there_are_none():
    assert SpeculationBenefit().rows(StepWork(1, 100), [0.9, 1.7], StepTimes()) in (0, 2)
    SpeculationBenefit().on_step_time(StepWork(1, 100), 0.1, StepTimes())


def test_a_row_that_was_dear_once_is_tried_again():
    machine = Machine(memory_bound)
    machine.run(1, 0.9, steps=50)
    fast, machine.seconds = machine.seconds, lambda work: 3.0 if work.drafts else 0.1
    machine.run(1, 0.9, steps=60)
    assert machine.rows == 0
    machine.seconds = fast
    machine.run(1, 0.9, steps=2500)
    assert machine.rows > 0


def test_acceptance_is_learnt_by_sequence_and_by_kind():
    acceptance = Acceptance()
    for _ in range(20):
        acceptance.record(1, 2, (1, 2, 3), [1, 2, 3, 4])
        acceptance.record(2, 2, (1, 2, 3), [9])
        acceptance.record(2, 4, (1, 2, 3), [1, 2])
    assert acceptance.of(1, 2) > 0.85
    assert acceptance.of(2, 2) < 0.25
    assert acceptance.of(2, 4) > 0.85
    assert 0.4 < acceptance.of(3, 2) < 0.8, "of a new one what holds for all"
    acceptance.forget(1)
    assert acceptance.of(1, 2) == acceptance.of(3, 2)


def test_nothing_is_learnt_of_what_was_not_tested():
    acceptance = Acceptance()
    before = acceptance.of(1, 2)
    acceptance.record(1, 2, (1, 2, 3), [])
    acceptance.record(1, 2, (), [1])
    assert acceptance.of(1, 2) == before
    acceptance.record(1, 2, (1, 9, 9), [1])
    assert acceptance.of(1, 2) > before
