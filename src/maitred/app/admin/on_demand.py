"""The models that are loaded on demand as an operator sees them, and what he can tell them.

What is said holds for this gateway until it is said otherwise or the gateway is started again, as for replicas.
"""

import logging
from collections.abc import Callable

from maitred.core.clock import Clock
from maitred.core.errors import Conflict, ResourceNotFound
from maitred.fleet.policy.model_residency import ModelResidency, ResidencyPhase
from maitred.fleet.residency.footprint import mebibytes
from maitred.fleet.residency.manager import ModelManager
from maitred.wire.admin.responses import LoadableBody, LoadableList, LoadableState

_log = logging.getLogger(__name__)


class OnDemandModelAdmin:
    """Implements `maitred.api.admin.models.OnDemandModels`.

    Args:
        residence: Where the models live.
        clock: The time.
    """

    def __init__(self, residence: ModelManager, clock: Clock) -> None:
        self._residence = residence
        self._residents = residence.residents
        self._clock = clock

    def all(self) -> LoadableList:
        """Every model, and the memory that they share."""
        names = list(self._residence.lodgers)
        return LoadableList(
            budget_bytes=self._residents.budget_bytes if names else None,
            taken_bytes=self._residents.taken_bytes,
            data=[self._body(name) for name in names],
        )

    def load(self, model: str) -> LoadableBody:
        """Loads it, as if a request waited for it."""
        return self._tell(model, self._check_fits, self._residence.order_load, "is to be loaded")

    def unload(self, model: str, *, hold: bool) -> LoadableBody:
        """Lets its answers end and gives its memory back."""

        def order(name: str) -> None:
            self._residence.order_unload(name, hold=hold)

        return self._tell(model, _check_unpinned, order, f"is to be unloaded{' and held' if hold else ''}")

    def sleep(self, model: str) -> LoadableBody:
        """Lets its answers end, and gives its memory back but for its process."""
        return self._tell(model, _check_unpinned, self._residence.order_sleep, "is to sleep")

    def pin(self, model: str) -> LoadableBody:
        """Loads it, and never unloads it for others."""
        return self._tell(model, self._check_leaves_room, self._residence.pin, "is pinned")

    def unpin(self, model: str) -> LoadableBody:
        """Lets it go when others need its room."""
        return self._tell(model, lambda one: None, self._residence.unpin, "is pinned no more")

    def _tell(
        self, model: str, check: Callable[[ModelResidency], None], order: Callable[[str], None], what: str
    ) -> LoadableBody:
        if model not in self._residence.lodgers:
            raise ResourceNotFound(
                f"There is no model {model[:200]!r} that is loaded on demand. GET /admin/v1/models lists those that "
                "are; others are always there.",
                param="model",
            )
        check(self._residents[model])
        order(model)
        _log.info("The model %s %s.", model, what)
        return self._body(model)

    def _check_fits(self, one: ModelResidency) -> None:
        """Raises Conflict where it could never be loaded beside those that are pinned."""
        room_bytes = self._residents.room_for(one.name)
        if one.memory_bytes > room_bytes:
            raise Conflict(
                f"{one.name} takes {mebibytes(one.memory_bytes)}, and of {mebibytes(self._residents.budget_bytes)} "
                f"only {mebibytes(room_bytes)} are left beside what is pinned: {self._pinned_but(one)}. Unpin one of "
                "these, or raise residency.memory_bytes."
            )

    def _check_leaves_room(self, one: ModelResidency) -> None:
        """Raises Conflict where it does not fit, or where another model could never be loaded beside it."""
        self._check_fits(one)
        for other in self._residents.all.values():
            if other is one or other.pinned or other.held or one.pinned:
                continue
            left_bytes = self._residents.room_for(other.name) - one.memory_bytes
            if other.memory_bytes > left_bytes:
                raise Conflict(
                    f"With {one.name} pinned, {other.name} could never be loaded: it takes "
                    f"{mebibytes(other.memory_bytes)}, and {mebibytes(max(0, left_bytes))} would be left. Unload "
                    f"{other.name} with `hold` first, or raise residency.memory_bytes."
                )

    def _pinned_but(self, one: ModelResidency) -> str:
        pinned = [other for other in self._residents.all.values() if other.pinned and other is not one]
        return ", ".join(f"{other.name} ({mebibytes(other.memory_bytes)})" for other in pinned) or "nothing"

    def _body(self, name: str) -> LoadableBody:
        one, lodger = self._residents[name], self._residence.lodgers[name]
        line = self._residence.line(name)
        now_s = self._clock.monotonic_s()
        return LoadableBody(
            model=name,
            state=self._state(one),
            pinned=one.pinned,
            held=one.held,
            reserved_bytes=one.memory_bytes,
            measured_bytes=self._residence.measured_bytes.get(name),
            waiting=line.waiting,
            running=line.running,
            loads=lodger.loads,
            unloads=lodger.unloads,
            failures=lodger.failures,
            idle_s=None if one.worked_s is None else round(max(0.0, now_s - one.worked_s), 3),
            predicted_load_s=round(one.comes_in_s, 3),
            ready_in_s=None if one.held else round(self._residence.ready_in_s(name), 3),
        )

    def _state(self, one: ModelResidency) -> LoadableState:
        match one.phase:
            case ResidencyPhase.OUT if one.held:
                return LoadableState.HELD
            case ResidencyPhase.OUT if one.asleep and one.asked_s is None:
                return LoadableState.ASLEEP
            case ResidencyPhase.LOADING if one.asleep:
                return LoadableState.WAKING
            case ResidencyPhase.OUT:
                return LoadableState.OUT if one.asked_s is None else LoadableState.WAITING
            case ResidencyPhase.LOADING:
                return LoadableState.LOADING
            case ResidencyPhase.IN:
                goes = one.dismissed or one.name in self._residents.closed_s
                return LoadableState.DRAINING if goes else LoadableState.SERVING
            case ResidencyPhase.LEAVING if one.naps:
                return LoadableState.DRAINING
            case ResidencyPhase.LEAVING:
                return LoadableState.UNLOADING


def _check_unpinned(one: ModelResidency) -> None:
    if one.pinned:
        raise Conflict(f"{one.name} is pinned. Unpin it first.")
