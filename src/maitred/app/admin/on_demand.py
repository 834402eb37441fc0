"""Admin of models that are loaded on demand: lists, loads, unloads, pins and puts them to sleep.

A command holds for this gateway until the next command or until the gateway is restarted, as for replicas.
"""

import logging
from collections.abc import Callable

from maitred.core.clock import Clock
from maitred.core.errors import Conflict, ResourceNotFound
from maitred.fleet.policy.model_residency import ModelResidency, ResidencyPhase
from maitred.fleet.residency.footprint import format_mebibytes
from maitred.fleet.residency.manager import ModelManager
from maitred.wire.admin.responses import LoadableBody, LoadableList, LoadableState

_log = logging.getLogger(__name__)


class OnDemandModelAdmin:
    """Manages models that are loaded on demand. Implements `maitred.api.admin.service.OnDemandModels`.

    Args:
        manager: Loads and unloads the models.
        clock: The clock.
    """

    def __init__(self, manager: ModelManager, clock: Clock) -> None:
        self._manager = manager
        self._models = manager.policy
        self._clock = clock

    def all(self) -> LoadableList:
        """Lists every model, and the memory that they share."""
        names = list(self._manager.models)
        return LoadableList(
            budget_bytes=self._models.budget_bytes if names else None,
            taken_bytes=self._models.used_bytes,
            data=[self._body(name) for name in names],
        )

    def load(self, model: str) -> LoadableBody:
        """Loads a model, as if a request waited for it."""
        return self._apply(model, self._check_fits, self._manager.order_load, "is to be loaded")

    def unload(self, model: str, *, hold: bool) -> LoadableBody:
        """Unloads a model once its responses have ended; with `hold` it is not loaded for requests again."""

        def order(name: str) -> None:
            self._manager.order_unload(name, hold=hold)

        return self._apply(model, _check_unpinned, order, f"is to be unloaded{' and held' if hold else ''}")

    def sleep(self, model: str) -> LoadableBody:
        """Puts a model to sleep once its responses have ended: its memory is freed, and its process stays."""
        return self._apply(model, _check_unpinned, self._manager.order_sleep, "is to sleep")

    def pin(self, model: str) -> LoadableBody:
        """Loads a model and never unloads it for others."""
        return self._apply(model, self._check_leaves_memory, self._manager.pin, "is pinned")

    def unpin(self, model: str) -> LoadableBody:
        """Allows a model to be unloaded when others need its memory."""
        return self._apply(model, lambda residency: None, self._manager.unpin, "is pinned no more")

    def _apply(
        self, model: str, check: Callable[[ModelResidency], None], order: Callable[[str], None], action: str
    ) -> LoadableBody:
        if model not in self._manager.models:
            raise ResourceNotFound(
                f"There is no model {model[:200]!r} that is loaded on demand. GET /admin/v1/models lists those that "
                "are; others are always there.",
                param="model",
            )
        check(self._models[model])
        order(model)
        _log.info("The model %s %s.", model, action)
        return self._body(model)

    def _check_fits(self, residency: ModelResidency) -> None:
        """Raises Conflict if the model could never be loaded beside the pinned models."""
        available_bytes = self._models.available_bytes_for(residency.name)
        if residency.memory_bytes > available_bytes:
            raise Conflict(
                f"{residency.name} takes {format_mebibytes(residency.memory_bytes)}, and of "
                f"{format_mebibytes(self._models.budget_bytes)} "
                f"only {format_mebibytes(available_bytes)} are left beside what is pinned: "
                f"{self._pinned_except(residency)}. "
                "Unpin one of "
                "these, or raise residency.memory_bytes."
            )

    def _check_leaves_memory(self, residency: ModelResidency) -> None:
        """Raises Conflict if the model does not fit, or if another model could never be loaded beside it."""
        self._check_fits(residency)
        for other in self._models.models.values():
            if other is residency or other.is_pinned or other.is_held or residency.is_pinned:
                continue
            left_bytes = self._models.available_bytes_for(other.name) - residency.memory_bytes
            if other.memory_bytes > left_bytes:
                raise Conflict(
                    f"With {residency.name} pinned, {other.name} could never be loaded: it takes "
                    f"{format_mebibytes(other.memory_bytes)}, and {format_mebibytes(max(0, left_bytes))} would be "
                    "left. Unload "
                    f"{other.name} with `hold` first, or raise residency.memory_bytes."
                )

    def _pinned_except(self, residency: ModelResidency) -> str:
        pinned = [other for other in self._models.models.values() if other.is_pinned and other is not residency]
        return ", ".join(f"{other.name} ({format_mebibytes(other.memory_bytes)})" for other in pinned) or "nothing"

    def _body(self, name: str) -> LoadableBody:
        residency, model = self._models[name], self._manager.models[name]
        demand = model.demand
        now_s = self._clock.monotonic_s()
        return LoadableBody(
            model=name,
            state=self._state(residency),
            pinned=residency.is_pinned,
            held=residency.is_held,
            reserved_bytes=residency.memory_bytes,
            measured_bytes=model.measured_bytes or None,
            waiting=demand.waiting,
            running=demand.running,
            loads=model.loads,
            unloads=model.unloads,
            failures=model.failures,
            idle_s=None if residency.last_served_s is None else round(max(0.0, now_s - residency.last_served_s), 3),
            predicted_load_s=round(residency.expected_start_s, 3),
            ready_in_s=None if residency.is_held else round(self._manager.ready_in_s(name), 3),
        )

    def _state(self, residency: ModelResidency) -> LoadableState:
        match residency.phase:
            case ResidencyPhase.UNLOADED if residency.is_held:
                return LoadableState.HELD
            case ResidencyPhase.UNLOADED if residency.is_asleep and residency.needed_since_s is None:
                return LoadableState.ASLEEP
            case ResidencyPhase.LOADING if residency.is_asleep:
                return LoadableState.WAKING
            case ResidencyPhase.UNLOADED:
                return LoadableState.OUT if residency.needed_since_s is None else LoadableState.WAITING
            case ResidencyPhase.LOADING:
                return LoadableState.LOADING
            case ResidencyPhase.LOADED:
                is_leaving = residency.unload_ordered or residency.name in self._models.draining_since_s
                return LoadableState.DRAINING if is_leaving else LoadableState.SERVING
            case ResidencyPhase.UNLOADING if residency.sleep_ordered:
                return LoadableState.DRAINING
            case ResidencyPhase.UNLOADING:
                return LoadableState.UNLOADING


def _check_unpinned(residency: ModelResidency) -> None:
    if residency.is_pinned:
        raise Conflict(f"{residency.name} is pinned. Unpin it first.")
