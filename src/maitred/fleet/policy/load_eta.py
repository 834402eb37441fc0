"""When a model will be there: the decisions of `residents` played through, with what is expected of everybody.

Loads and unloads take about as long as they did before. What decides a wait is for how long the models stay that are
in memory now, and that is open: a model that is used often keeps its turn, unless it pauses for as long as a load
takes. With pauses whose lengths are exponential around their usual one, that happens at any of them with the same
chance, and what is said here is the time by which it has happened as often as not.
"""

import math

from maitred.fleet.policy.model_residency import ModelDemand, ModelResidency, ResidencyPhase
from maitred.fleet.policy.residency import Demands, ResidencyPolicy

_IDLE = ModelDemand()
_OVERDUE, _LATE = 0.1, 0.5
"""A load that takes longer than usual is said to take this part of its usual time still, and this part of what it is
late by: whatever slows it will not end because we look."""
_NEVER = 1e-9
"""Chances per second below which a model is said to stay to the end of its turn."""


def ready_in_s(residents: ResidencyPolicy, name: str, now_s: float, demands: Demands) -> float:
    """When a model will serve that is needed from now on at the latest: 0 for one that does.

    Each model in the order of the loads takes the room that is free first.

    Args:
        residents: All of them.
        name: The model that is asked for.
        now_s: Now.
        demands: What each model has to do, as for `ResidencyPolicy.decide`.
    """
    target = residents[name]
    if target.phase is ResidencyPhase.IN and name not in residents.closed_s:
        return 0.0
    free = residents.budget_bytes - residents.taken_bytes
    at_s = now_s
    pace = 1.0
    leaving: list[tuple[float, int]] = []
    for one in residents.all.values():
        goes_s: float | None = None
        if one.phase is ResidencyPhase.LEAVING:
            goes_s = max(now_s, one.since_s + residents.unload.seconds)
        elif one.phase is ResidencyPhase.LOADING:
            at_s = _ends_s(one, now_s)
            # What slows this load slows those after it.
            pace = max(1.0, (at_s - one.since_s) / one.ready_in_s)
            if one is target:
                return at_s - now_s
            goes_s = None if one.pinned else at_s + _stays_s(residents, one) + residents.unload.seconds
        elif one.phase is ResidencyPhase.IN and not one.pinned:
            goes_s = _leaves_s(residents, one, now_s, demands) + residents.unload.seconds
        if goes_s is not None:
            leaving.append((goes_s, one.counted_bytes))
    for one in _line(residents, target, now_s, demands):
        leaving.sort()
        free += one.counted_bytes if one.phase is ResidencyPhase.OUT else 0
        while free < one.memory_bytes and leaving:
            goes_s, memory_bytes = leaving.pop(0)
            at_s, free = max(at_s, goes_s), free + memory_bytes
        at_s = max(at_s, one.not_before_s) + pace * one.ready_in_s
        if one is target:
            break
        free -= one.memory_bytes
        leaving.append((at_s + _stays_s(residents, one) + residents.unload.seconds, one.memory_bytes))
    return at_s - now_s


def _ends_s(one: ModelResidency, now_s: float) -> float:
    """When the load of a model that is being loaded should be complete."""
    late_s = now_s - one.since_s - one.ready_in_s
    return now_s + max(-late_s, _OVERDUE * one.ready_in_s + _LATE * max(0.0, late_s))


def _line(residents: ResidencyPolicy, target: ModelResidency, now_s: float, demands: Demands) -> list[ModelResidency]:
    """Those that will be loaded, in their order, up to the one that is asked for.

    Whoever waits for a model that is just leaving, or that nobody has looked at yet, has come before us.
    """
    asked = [
        one
        for one in residents.all.values()
        if one.phase in (ResidencyPhase.OUT, ResidencyPhase.LEAVING)
        and not one.held
        and (one.asked_s is not None or demands.get(one.name, _IDLE).waiting)
    ]
    asked.sort(key=lambda one: (not one.pinned, now_s if one.asked_s is None else one.asked_s, one.name))
    again = [one for one in residents.all.values() if one.name in residents.closed_s]
    line = [*asked, *again]
    return line if target in line else [*line, target]


def _leaves_s(residents: ResidencyPolicy, one: ModelResidency, now_s: float, demands: Demands) -> float:
    """When a model that is in is expected to be told to go, and to have nothing to do any more."""
    demand = demands.get(one.name, _IDLE)
    over_s = max(now_s, one.since_s + residents.turn_s(one))
    drain_s = one.drain.seconds if demand.running else 0.0
    if one.name in residents.closed_s:
        return now_s + drain_s
    if not demand.any and residents.may_go_s(one, now_s, demands) <= now_s:
        return now_s
    if one.gap_s >= one.load.seconds:
        return min(over_s + drain_s, now_s + one.spell.seconds)
    idle_s = None if demand.any else now_s - one.used_s
    return now_s + _lasts_s(one, over_s - now_s, idle_s) + one.drain.seconds


def _stays_s(residents: ResidencyPolicy, one: ModelResidency) -> float:
    """For how long a model that has just been loaded is expected to stay while others are waited for."""
    turn_s = residents.turn_s(one)
    return min(turn_s, one.spell.seconds) if one.gap_s >= one.load.seconds else _lasts_s(one, turn_s, None)


def _lasts_s(one: ModelResidency, rest_s: float, idle_s: float | None) -> float:
    """After how long a model that is used often has paused for as long as its load takes, as often as not.

    Args:
        one: The model; its pauses are usually shorter.
        rest_s: Of its turn; it stays no longer.
        idle_s: How long it pauses already; None: it does not.
    """
    gap_s, load_s = max(one.gap_s, 1e-3), one.load.seconds
    pause_s = load_s if idle_s is None else max(0.0, load_s - idle_s)
    now = 0.0 if idle_s is None else math.exp(-pause_s / gap_s)
    if now >= 0.5:
        return min(rest_s, pause_s)
    rate = math.exp(-load_s / gap_s) / (gap_s + one.spell.seconds)
    if rate < _NEVER:
        return rest_s
    return min(rest_s, math.log(2 * (1 - now)) / rate + pause_s)
