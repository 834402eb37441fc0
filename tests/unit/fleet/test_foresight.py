"""Predicted waits, compared with the real ones on a machine whose load times vary."""

import random

import pytest

from maitred.fleet.policy.load_eta import ready_in_s
from tests.support.model_machine import TICK_S, UNLOAD_S, machine

LEAST_S = 4 * TICK_S
"""What is shorter is mostly how coarse the machine's clock is."""
MODELS = "abc"


def asked(one, model):
    return ready_in_s(one.residents, model, one.now_s, one.demands())


def test_who_waits_for_another_model_since_just_now_has_come_before():
    one = machine([1, 1, 1], 1, loads_s=2.0)
    assert asked(one, "b") == 2.0
    one.call("a")  # nobody has looked at it yet
    assert asked(one, "b") == pytest.approx(2.0 + 0.5 + 0.2 + 2.0)  # its load, its answers, its unload, and ours


def test_an_idle_model_that_is_used_often_is_expected_back_and_keeps_its_turn():
    one = machine([1, 1], 1, loads_s=4.0, turn_loads=4.0)
    for _ in range(20):
        one.call("a")
        one.until(one.now_s + 0.5)
    turn_s = one.residents.turn_s(one.residents["a"])
    over_s = one.residents["a"].phase_since_s + turn_s - one.now_s
    assert asked(one, "b") == pytest.approx(over_s + UNLOAD_S + 4.0, abs=0.5)


def test_the_longer_a_pause_the_sooner_its_end_is_the_models():
    one = machine([1, 1], 1, loads_s=4.0, turn_loads=4.0)
    for _ in range(4):
        one.call("a")
        one.until(one.now_s + 2.0)
    predicted = []
    while one.residents.evictable_from_s(one.residents["a"], one.now_s, one.demands()) > one.now_s:
        predicted.append(asked(one, "b"))
        one.tick()
    assert predicted == sorted(predicted, reverse=True)
    assert predicted[-1] < 6.0 < predicted[0]


def test_a_late_load_is_predicted_to_take_longer_and_so_are_those_after_it():
    one = machine([1, 1], 1, loads_s=[12.0, 4.0], turn_loads=0.0, guess_s=4.0)
    one.call("a")
    one.tick()
    one.until(one.now_s + 2.0)
    assert asked(one, "a") == pytest.approx(2.0, abs=TICK_S)
    one.until(one.now_s + 2.0)
    punctual_s = asked(one, "b") - asked(one, "a")
    one.until(one.now_s + 4.0)
    assert asked(one, "a") == pytest.approx(0.4 + 0.5 * 4.0, abs=TICK_S)
    assert asked(one, "b") - asked(one, "a") > 2 * punctual_s


def errors_of(traffic, seeds=24):
    """Of the waits that were foreseen, or turned out, to be long, in parts of what they turned out to be."""
    errors = []
    for seed in range(seeds):
        draw = random.Random(seed)
        one = machine([1, 1, 1], 2, loads_s=4.0, turn_loads=4.0, guess_s=3.5)
        traffic(one, draw)
        one.until(one.now_s + 60)
        waits = [(call.predicted_s, call.waited_s) for call in one.calls]
        errors += [
            abs(predicted - came) / max(came, TICK_S) for predicted, came in waits if max(predicted, came) >= LEAST_S
        ]
    return sorted(errors)


def vary(one, draw):
    one.loads_s = {name: draw.uniform(3.4, 5.2) for name in MODELS}


def alternating(one, draw):
    """Callers that go from model to model and wait for each answer."""
    callers = [[number, None] for number in range(9)]
    while one.now_s < 150:
        vary(one, draw)
        for caller in callers:
            turn, call = caller
            if call is None or (call.began_s is not None and call.began_s + call.runs_s <= one.now_s):
                caller[:] = turn + 1, one.call(MODELS[turn % 3], draw.uniform(0.25, 0.9))
        one.tick()


def skewed(one, draw):
    """Requests that come whatever becomes of the others, most of them for one model."""
    next_s = one.now_s
    while one.now_s < 150:
        vary(one, draw)
        while next_s <= one.now_s:
            (model,) = draw.choices(MODELS, (0.7, 0.25, 0.05))
            one.call(model, draw.uniform(0.2, 0.5))
            next_s += draw.expovariate(4.0)
        one.tick()


@pytest.mark.parametrize(("traffic", "median", "nine_in_ten"), [(alternating, 0.2, 0.4), (skewed, 0.2, 0.6)])
def test_most_waits_are_as_predicted(traffic, median, nine_in_ten):
    errors = errors_of(traffic)
    assert len(errors) > 300
    assert errors[len(errors) // 2] <= median
    assert errors[9 * len(errors) // 10] <= nine_in_ten
