"""Prediction of when a model will be ready: the decisions of `ResidencyPolicy` simulated with expected durations.

Loads and unloads take about as long as they did before. A wait depends on how long the models in memory will stay, and
this is uncertain: a model that is used often keeps its turn, unless it pauses for as long as a load takes. If the
pauses have an exponential distribution around their usual length, each pause is that long with the same probability,
and the prediction is the time by which this has happened with a probability of one half.
"""

import math

from maitred.fleet.policy.model_residency import ModelDemand, ModelResidency, ResidencyPhase
from maitred.fleet.policy.residency import Demands, ResidencyPolicy

_IDLE = ModelDemand()
_OVERDUE_SHARE, _LATE_SHARE = 0.1, 0.5
"""Estimated rest of an overdue load: a part of its usual time plus a part of its delay.

The cause of a delay does not end when the delay is noticed.
"""
_NEGLIGIBLE_RATE = 1e-9
"""Probability per second below which a model is expected to stay to the end of its turn."""


def ready_in_s(policy: ResidencyPolicy, name: str, now_s: float, demands: Demands) -> float:
    """Returns when a model will serve if it is needed from now on: 0 for a model that serves already.

    The models are loaded in order, and each takes the memory that becomes free first.

    Args:
        policy: The policy with all models.
        name: The model that is requested.
        now_s: The present time.
        demands: Demand of each model, as for `ResidencyPolicy.decide`.
    """
    target = policy[name]
    if target.phase is ResidencyPhase.LOADED and name not in policy.draining_since_s:
        return 0.0
    free = policy.budget_bytes - policy.used_bytes
    at_s = now_s
    pace = 1.0
    leaving: list[tuple[float, int]] = []
    for model in policy.models.values():
        freed_s: float | None = None
        if model.phase is ResidencyPhase.UNLOADING:
            freed_s = max(now_s, model.phase_since_s + policy.unload_time.seconds)
        elif model.phase is ResidencyPhase.LOADING:
            at_s = _load_ends_s(model, now_s)
            # The cause that slows this load also slows the later loads.
            pace = max(1.0, (at_s - model.phase_since_s) / model.expected_start_s)
            if model is target:
                return at_s - now_s
            freed_s = None if model.is_pinned else at_s + _expected_stay_s(policy, model) + policy.unload_time.seconds
        elif model.phase is ResidencyPhase.LOADED and not model.is_pinned:
            freed_s = _expected_leave_s(policy, model, now_s, demands) + policy.unload_time.seconds
        if freed_s is not None:
            leaving.append((freed_s, model.counted_bytes))
    for model in _load_queue(policy, target, now_s, demands):
        leaving.sort()
        free += model.counted_bytes if model.phase is ResidencyPhase.UNLOADED else 0
        while free < model.memory_bytes and leaving:
            freed_s, memory_bytes = leaving.pop(0)
            at_s, free = max(at_s, freed_s), free + memory_bytes
        at_s = max(at_s, model.not_before_s) + pace * model.expected_start_s
        if model is target:
            break
        free -= model.memory_bytes
        leaving.append((at_s + _expected_stay_s(policy, model) + policy.unload_time.seconds, model.memory_bytes))
    return at_s - now_s


def _load_ends_s(model: ModelResidency, now_s: float) -> float:
    """Returns when the load of a loading model should be complete."""
    late_s = now_s - model.phase_since_s - model.expected_start_s
    return now_s + max(-late_s, _OVERDUE_SHARE * model.expected_start_s + _LATE_SHARE * max(0.0, late_s))


def _load_queue(
    policy: ResidencyPolicy, target: ModelResidency, now_s: float, demands: Demands
) -> list[ModelResidency]:
    """Returns the models that will be loaded, in their order, up to the one that is asked for.

    Requests that wait for an unloading model, or for one whose demand was not observed yet, have come earlier.
    """
    needed = [
        model
        for model in policy.models.values()
        if model.phase in (ResidencyPhase.UNLOADED, ResidencyPhase.UNLOADING)
        and not model.is_held
        and policy.could_fit(model.name)
        and (model.needed_since_s is not None or demands.get(model.name, _IDLE).waiting)
    ]
    needed.sort(
        key=lambda model: (
            not model.is_pinned,
            now_s if model.needed_since_s is None else model.needed_since_s,
            model.name,
        )
    )
    reloading = [model for model in policy.models.values() if model.name in policy.draining_since_s]
    queue = [*needed, *reloading]
    return queue if target in queue else [*queue, target]


def _expected_leave_s(policy: ResidencyPolicy, model: ModelResidency, now_s: float, demands: Demands) -> float:
    """Returns when a loaded model is expected to be unloaded, with its last answer complete."""
    demand = demands.get(model.name, _IDLE)
    turn_ends_s = max(now_s, model.phase_since_s + policy.turn_s(model))
    drain_s = model.drain_time.seconds if demand.running else 0.0
    if model.name in policy.draining_since_s:
        return now_s + drain_s
    if not demand.any and policy.evictable_from_s(model, now_s, demands) <= now_s:
        return now_s
    if model.usual_idle_s >= model.load_time.seconds:
        return min(turn_ends_s + drain_s, now_s + model.busy_time.seconds)
    idle_s = None if demand.any else now_s - model.last_demand_s
    return now_s + _median_stay_s(model, turn_ends_s - now_s, idle_s) + model.drain_time.seconds


def _expected_stay_s(policy: ResidencyPolicy, model: ModelResidency) -> float:
    """Returns for how long a model that has just been loaded is expected to stay while requests wait for others."""
    turn_s = policy.turn_s(model)
    return (
        min(turn_s, model.busy_time.seconds)
        if model.usual_idle_s >= model.load_time.seconds
        else _median_stay_s(model, turn_s, None)
    )


def _median_stay_s(model: ModelResidency, turn_left_s: float, idle_s: float | None) -> float:
    """Returns the median time until a model that is used often has paused for as long as its load takes.

    Args:
        model: The model; its pauses are usually shorter than its load.
        turn_left_s: Rest of its turn; the model stays no longer than this.
        idle_s: How long the model has been idle; None: it is busy.
    """
    gap_s, load_s = max(model.usual_idle_s, 1e-3), model.load_time.seconds
    pause_s = load_s if idle_s is None else max(0.0, load_s - idle_s)
    leave_chance = 0.0 if idle_s is None else math.exp(-pause_s / gap_s)
    if leave_chance >= 0.5:
        return min(turn_left_s, pause_s)
    rate = math.exp(-load_s / gap_s) / (gap_s + model.busy_time.seconds)
    if rate < _NEGLIGIBLE_RATE:
        return turn_left_s
    return min(turn_left_s, math.log(2 * (1 - leave_chance)) / rate + pause_s)
