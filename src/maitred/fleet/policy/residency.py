"""Residency policy: load on demand, unload the least recently used, never exceed the budget, never thrash.

The model that has been needed for longest is loaded next, one at a time. If memory is lacking, other models must be
unloaded. Least-recently-used alone chooses badly: with three models in turn and memory for two, it unloads each model
just before it is needed, and loads all the time. Here a loaded model has a *turn*: a multiple of its load time
(`turn_loads`); so while all models have work, loading takes at most one part in ``1 + turn_loads`` of the time of a
share of memory, in whatever order the loads alternate. Requests for other models that arrive meanwhile are served
together when these are loaded. During its turn a model may be unloaded only when it is idle and is not expected to be
needed before it could be loaded again: the break-even point of renting against buying (Karlin, Manasse, Rudolph and
Sleator, "Competitive snoopy caching", 1988), with the usual length of its idle times in place of the unknown future.

After its turn a model stays for as long as no other needs its memory. Then the idle models are unloaded first,
beginning with the one that is expected to stay idle for longest; among the busy models, the one that was loaded first
is unloaded first. A model that is to be unloaded gets no new requests, its running answers are completed, and its queue
keeps its order and waits for the model's next turn.

So no model starves: the longest-needed model waits at most for the remaining turns of the models to be unloaded, for
their running answers, and for a load.
"""

from collections.abc import Iterable, Mapping

from maitred.fleet.policy.model_residency import ModelDemand, ModelResidency, MovingEstimate, ResidencyPhase
from maitred.fleet.policy.reconciler import DesiredReplicas

_IDLE = ModelDemand()
MIN_TURN_S = 1.0
"""Shortest length of a turn, even after a short load: waiting requests must be dispatched before the turn ends."""

Demands = Mapping[str, ModelDemand]


class ResidencyPolicy:
    """Policy that decides which models of one machine are in memory.

    Args:
        models: The models.
        budget_bytes: Memory that the loaded models may take together.
        turn_loads: Length of a turn, as a multiple of the model's load time.

    Attributes:
        unload_time: Time from the order to unload until the memory is free.
        draining_since_s: Models that are to be unloaded and still have running requests, and since when.
    """

    def __init__(self, models: Iterable[ModelResidency], budget_bytes: int, turn_loads: float) -> None:
        self.models = {model.name: model for model in models}
        self.budget_bytes = budget_bytes
        self._turn_loads = turn_loads
        self.unload_time = MovingEstimate(0.2)
        self.draining_since_s: dict[str, float] = {}

    def __getitem__(self, name: str) -> ModelResidency:
        return self.models[name]

    @property
    def used_bytes(self) -> int:
        """Memory of all models that are not unloaded, and of those that sleep."""
        return sum(model.counted_bytes for model in self.models.values())

    def available_bytes_for(self, name: str) -> int:
        """Returns the most memory that a model could ever have: the budget less the models that others have pinned."""
        return self.budget_bytes - sum(
            model.memory_bytes for model in self.models.values() if model.is_pinned and model.name != name
        )

    def could_fit(self, name: str) -> bool:
        """Whether a model could be loaded if all others were unloaded that are not pinned.

        It may be found larger than estimated, or another one may be pinned.
        """
        return self.models[name].memory_bytes <= self.available_bytes_for(name)

    # --- decisions ---

    def decide(self, now_s: float, demands: Demands) -> Mapping[str, DesiredReplicas]:
        """Decides what to do, and records it as begun; returns how many replicas of each model should serve and sleep.

        A model whose replica should not serve any more completes its answers first. The caller must pass on the numbers
        at once; a second call without any change in between decides nothing more.

        Args:
            now_s: The present time.
            demands: Demand of each model; a missing model has no demand.
        """
        for model in self.models.values():
            model.forget_measured(now_s)
        for model in self.models.values():
            model.observe(demands.get(model.name, _IDLE), now_s)
            if model.phase is ResidencyPhase.UNLOADED and not self.could_fit(model.name):
                model.is_wanted, model.needed_since_s = model.is_pinned, None
        # A model may be in all three groups.
        leaving = dict.fromkeys(
            (*self._victims(now_s, demands), *self._idle_too_long(now_s, demands), *self._ordered_to_unload())
        )
        draining = [model.name for model in leaving if demands.get(model.name, _IDLE).running]
        for model in leaving:
            if model.name not in draining:
                self.on_leaving(model.name, now_s)
        self.draining_since_s = {name: self.draining_since_s.get(name, now_s) for name in draining}
        next_model = self._next_to_load(now_s)
        free = self.budget_bytes - self.used_bytes
        if (
            next_model is not None
            and not self._loading_model()
            and next_model.memory_bytes - next_model.counted_bytes <= free
        ):
            next_model.enter_phase(ResidencyPhase.LOADING, now_s)
        return {name: self._numbers_of(model) for name, model in self.models.items()}

    def _numbers_of(self, model: ModelResidency) -> DesiredReplicas:
        """Returns how many replicas of a model should serve and sleep in its present phase."""
        is_draining = model.name in self.draining_since_s
        if model.phase is ResidencyPhase.LOADING or (model.phase is ResidencyPhase.LOADED and not is_draining):
            return DesiredReplicas(1)
        keeps_process = model.is_asleep if model.phase is ResidencyPhase.UNLOADED else model.sleep_ordered
        return DesiredReplicas(0, int(keeps_process))

    def _loaded_models(self) -> list[ModelResidency]:
        return [model for model in self.models.values() if model.phase is ResidencyPhase.LOADED]

    def _loading_model(self) -> ModelResidency | None:
        return next((model for model in self.models.values() if model.phase is ResidencyPhase.LOADING), None)

    def _load_queue(self, now_s: float) -> list[ModelResidency]:
        """Returns the models that are needed and can be loaded, in the order of their loads.

        One that can never fit would keep all others waiting.
        """
        needed = [
            model
            for model in self.models.values()
            if model.phase is ResidencyPhase.UNLOADED and model.needed_since_s is not None and not model.is_held
        ]
        loadable = (model for model in needed if model.not_before_s <= now_s and self.could_fit(model.name))
        return sorted(loadable, key=_load_order)

    def _next_to_load(self, now_s: float) -> ModelResidency | None:
        return next(iter(self._load_queue(now_s)), None)

    def _victims(self, now_s: float, demands: Demands) -> list[ModelResidency]:
        """Returns the models to unload for the next load: enough of them, or none."""
        free = self.budget_bytes - sum(
            model.counted_bytes for model in self.models.values() if model.phase is not ResidencyPhase.UNLOADING
        )
        next_model = None if self._loading_model() else self._next_to_load(now_s)
        # A model may turn out larger than estimated. Then a model is unloaded even during its turn.
        over_budget = free < 0
        missing_bytes = (
            -free
            if over_budget
            else next_model.memory_bytes - next_model.counted_bytes - free
            if next_model is not None
            else 0
        )
        victims: list[ModelResidency] = []
        for model in self.models.values():
            if missing_bytes > 0 and _is_sleeping(model) and model is not next_model:
                victims.append(model)
                missing_bytes -= model.asleep_bytes
        for model in sorted(
            self._loaded_models(), key=lambda model: self._eviction_key(model, demands.get(model.name, _IDLE), now_s)
        ):
            if missing_bytes <= 0:
                break
            if not model.is_pinned and (over_budget or self.evictable_from_s(model, now_s, demands) <= now_s):
                victims.append(model)
                missing_bytes -= model.memory_bytes
        return victims if missing_bytes <= 0 or over_budget else []

    def _eviction_key(self, model: ModelResidency, demand: ModelDemand, now_s: float) -> tuple[bool, float, str]:
        """Returns the sort key of eviction; the least is unloaded first."""
        return (
            not model.unload_ordered and demand.any,
            model.phase_since_s if demand.any else -model.next_use_s(now_s),
            model.name,
        )

    def _idle_too_long(self, now_s: float, demands: Demands) -> list[ModelResidency]:
        """Returns the models that have been idle for longer than their `keep_alive_s`."""
        return [
            model
            for model in self._loaded_models()
            if model.keep_alive_s is not None
            and not (model.is_pinned or demands.get(model.name, _IDLE).any)
            and now_s - model.last_demand_s >= model.keep_alive_s
        ]

    def _ordered_to_unload(self) -> list[ModelResidency]:
        """Returns the models whose unload the operator has ordered; the process of a sleeping one can be ended, too."""
        return [
            model
            for model in self.models.values()
            if model.unload_ordered and (model.phase is ResidencyPhase.LOADED or _is_sleeping(model))
        ]

    def turn_s(self, model: ModelResidency) -> float:
        """Returns the length of the model's turn."""
        return max(MIN_TURN_S, self._turn_loads * model.load_time.seconds)

    def evictable_from_s(self, model: ModelResidency, now_s: float, demands: Demands) -> float:
        """Returns the time from which a loaded model may be unloaded, in the present state."""
        turn_ends_s = model.phase_since_s + self.turn_s(model)
        if model.unload_ordered:
            return now_s
        if demands.get(model.name, _IDLE).any:
            return turn_ends_s
        if model.next_use_s(now_s) >= model.load_time.seconds:
            return now_s
        return min(turn_ends_s, model.last_demand_s + model.load_time.seconds)

    # --- events ---

    def on_leaving(self, name: str, now_s: float) -> None:
        """Records that a model which is to leave serves no more: its process ends now, or falls asleep."""
        model = self.models[name]
        if (since_s := self.draining_since_s.pop(name, None)) is not None:
            model.drain_time.observe(now_s - since_s)
        model.enter_phase(ResidencyPhase.UNLOADING, now_s)

    def on_loaded(self, name: str, now_s: float, measured_bytes: int) -> None:
        """Records that a load is complete."""
        model = self.models[name]
        if model.is_asleep:
            model.wake_time.observe(now_s - model.phase_since_s)
        else:
            model.load_time.observe(now_s - model.phase_since_s)
            for other in self.models.values():
                other.load_time.scale_guess(model.load_time.ratio)
        model.enter_phase(ResidencyPhase.LOADED, now_s)
        model.on_measured(measured_bytes, now_s)

    def on_unloaded(self, name: str, now_s: float) -> None:
        """Records that the process of an unloading model is gone."""
        model = self.models[name]
        self.unload_time.observe(now_s - model.phase_since_s)
        model.is_asleep = False
        model.enter_phase(ResidencyPhase.UNLOADED, now_s)

    def on_asleep(self, name: str, now_s: float, measured_bytes: int, wakes_in_s: float) -> None:
        """Records that a model which was ordered to sleep is asleep."""
        model = self.models[name]
        model.is_asleep, model.asleep_bytes = True, measured_bytes
        if not model.wake_time.count:
            model.wake_time = MovingEstimate(wakes_in_s)
        model.enter_phase(ResidencyPhase.UNLOADED, now_s)

    def on_load_failed(self, name: str, now_s: float, retry_in_s: float) -> None:
        """Records that a load has failed, with its process gone."""
        model = self.models[name]
        model.is_asleep = False
        model.enter_phase(ResidencyPhase.UNLOADED, now_s)
        model.not_before_s, model.needed_since_s = now_s + retry_in_s, None

    def mark_wanted(self, name: str, now_s: float) -> None:
        """Records that a caller that could not wait for the model will retry."""
        model = self.models[name]
        if model.phase in (ResidencyPhase.UNLOADED, ResidencyPhase.UNLOADING) and not model.is_wanted:
            model.is_wanted = True
            model.needed_since_s = now_s if model.needed_since_s is None else model.needed_since_s

    def mark_needed(self, name: str, now_s: float) -> None:
        """Records at once that a request waits for the model.

        So models are loaded in the order in which they were needed.
        """
        model = self.models[name]
        if model.phase is ResidencyPhase.UNLOADED and model.needed_since_s is None and not model.is_held:
            model.needed_since_s = now_s

    # --- orders of the operator ---

    def order_load(self, name: str, now_s: float) -> None:
        """Orders a load as if a request waited for it, also after a failed load. Call it only if the model fits."""
        model = self.models[name]
        model.is_held = model.unload_ordered = model.sleep_ordered = False
        model.not_before_s = float("-inf")
        self.mark_wanted(name, now_s)

    def order_unload(self, name: str, *, hold: bool) -> None:
        """Orders an unload after the running answers.

        The model is loaded again when it is needed or, with `hold`, when the operator orders it.
        """
        model = self.models[name]
        model.is_held, model.is_wanted, model.sleep_ordered = hold, False, False
        model.unload_ordered = model.phase in (ResidencyPhase.LOADED, ResidencyPhase.LOADING) or _is_sleeping(model)
        if hold:
            model.needed_since_s = None

    def order_sleep(self, name: str) -> None:
        """Orders the model to free its memory after the running answers and to keep its process.

        A model that is not loaded stays as it is.
        """
        model = self.models[name]
        model.is_wanted = False
        model.unload_ordered = model.sleep_ordered = model.phase in (ResidencyPhase.LOADED, ResidencyPhase.LOADING)

    def pin(self, name: str, now_s: float) -> None:
        """Pins the model: it is loaded and never unloaded. Call it only if the model fits."""
        self.models[name].is_pinned = True
        self.order_load(name, now_s)

    def unpin(self, name: str) -> None:
        """Unpins the model: it stays loaded until others need its memory."""
        model = self.models[name]
        model.is_pinned = model.is_wanted = False


def _is_sleeping(model: ModelResidency) -> bool:
    return model.is_asleep and model.phase is ResidencyPhase.UNLOADED


def _load_order(model: ModelResidency) -> tuple[bool, float, str]:
    return not model.is_pinned, model.needed_since_s or 0.0, model.name
