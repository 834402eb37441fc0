"""Admin of canary rollouts: decisions of operators and trials are stored, and applied at once.

A decision takes effect here before it is stored: a canary that is shown to be bad gets no further request, whether the
store answers or not. Other gateways follow within `_SYNC_INTERVAL_S`. If another gateway has stored a change meanwhile,
that change wins over a trial's decision, because the decision belonged to a trial that is over.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from maitred.core.clock import Clock
from maitred.core.errors import Conflict, InvalidRequest, ResourceNotFound, StoreUnavailable
from maitred.core.rollout import RolloutPhase, RolloutState
from maitred.observe.metrics.rollouts import RolloutMetricsState
from maitred.routing.pools.names import NameResolver
from maitred.routing.rollout.config import RolloutConfig, TrialConfig
from maitred.routing.rollout.faults import rollout_faults
from maitred.routing.rollout.live import LiveRollout, LiveRollouts
from maitred.routing.rollout.trial import TrialDecision
from maitred.store.rollouts import RolloutChange, RolloutStore
from maitred.wire.admin.requests import StartRollout, WeighRollout
from maitred.wire.admin.responses import RolloutBody
from maitred.wire.admin.times import to_iso

log = logging.getLogger(__name__)

_SYNC_INTERVAL_S = 1.0
_PHASES = {TrialDecision.ABORT: RolloutPhase.ABORTED, TrialDecision.PROMOTE: RolloutPhase.PROMOTED}


class RolloutAdmin:
    """Manages rollouts; its `run` must be running. Implements `maitred.api.admin.service.RolloutService`.

    Args:
        store: Stores decisions.
        live: The rollouts that this gateway applies.
        names: The table of model names, which gets every change.
        clock: The time.
        interval_s: Time between two reads of the store.
    """

    def __init__(
        self,
        store: RolloutStore,
        live: LiveRollouts,
        names: NameResolver,
        clock: Clock,
        *,
        interval_s: float = _SYNC_INTERVAL_S,
    ) -> None:
        self._store = store
        self._live = live
        self._names = names
        self._clock = clock
        self._interval_s = interval_s
        self._unstored: dict[str, RolloutState] = {}
        """Decisions of trials that are not stored yet, by rollout."""
        self._decision_made = asyncio.Event()
        self.decisions: dict[tuple[str, str], int] = {}
        """Rollout and phase -> how often this gateway has moved the rollout to the phase."""

    async def open(self, declared: Mapping[str, RolloutConfig]) -> None:
        """Stores the rollouts of the configuration, and applies what was decided before.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        self.reconfigure(self._names, await self.declare(declared))

    async def declare(self, declared: Mapping[str, RolloutConfig]) -> list[RolloutState]:
        """Stores the rollouts of the configuration; returns all rollouts as they are then.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        await self._store.declare({name: config.to_json() for name, config in declared.items()})
        return await self._store.all()

    def reconfigure(self, names: NameResolver, states: Sequence[RolloutState] | None = None) -> None:
        """Uses another table of model names from now on.

        Args:
            names: The table.
            states: The states of the rollouts; None: the states that are applied now.
        """
        self._names = names
        self._apply([rollout.state for rollout in self._live.values()] if states is None else states)

    async def run(self) -> None:
        """Stores decisions of this gateway and applies those of others, until the task is cancelled."""
        store_unavailable = False
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._decision_made.wait()
            self._decision_made.clear()
            for rollout in self._live.values():
                self.apply_decision(rollout, rollout.advance(self._clock.monotonic_s()))
            try:
                await self.refresh()
                store_unavailable = False
            except StoreUnavailable as error:
                if not store_unavailable:
                    log.warning("Rollouts are kept as they are: %s", error.message)
                store_unavailable = True
                await asyncio.sleep(self._interval_s)

    async def refresh(self) -> None:
        """Stores this gateway's decisions, then applies what is in the store.

        Raises:
            StoreUnavailable: The store cannot be reached. This gateway's decisions hold nevertheless, and are stored
                later.
        """
        for name, decided in list(self._unstored.items()):
            await self._store.change(name, lambda current, decided=decided: _resolve_conflict(current, decided))  # type: ignore[misc]
            self._unstored.pop(name, None)
        self._apply(await self._store.all())

    def apply_decision(self, rollout: LiveRollout, decision: TrialDecision) -> None:
        """Applies the decision of a trial, as far as the rollout is automatic."""
        state, automatic = rollout.state, rollout.config.automatic
        phase = _PHASES.get(decision)
        if phase is None or automatic == "none" or (phase is RolloutPhase.PROMOTED and automatic != "promote"):
            return
        result = rollout.result()
        reason = ", ".join(result.faults) or f"as good as {rollout.config.stable}"
        decided = state.with_phase(phase, self._clock.wall_s(), f"{reason}, after {result.canary_requests} requests")
        self._unstored[state.name] = decided
        rollout.apply_state(decided)
        self._names.rollout_models = self._live.default_models
        self._log_change(decided)
        self._decision_made.set()

    def state(self, copies: Mapping[tuple[str, str], int]) -> RolloutMetricsState:
        """Returns the state of all rollouts for metrics.

        Args:
            copies: Rollout and outcome -> number of shadow copies.
        """
        live = self._live.items()
        return RolloutMetricsState(
            weight={name: rollout.split.weight for name, rollout in live},
            requests={(name, version): n for name, rollout in live for version, n in rollout.requests.items()},
            evidence={
                (name, fault): share for name, rollout in live for fault, share in rollout.trial.evidence().items()
            },
            copies=copies,
            decisions=self.decisions,
        )

    # --- commands of operators ---

    def all(self) -> list[RolloutBody]:
        """Lists every rollout that has not ended, by name."""
        return [_body(rollout) for _, rollout in sorted(self._live.items())]

    def get(self, name: str) -> RolloutBody:
        """Returns a rollout; raises ResourceNotFound."""
        if name not in self._live:
            raise _not_found(name)
        return _body(self._live[name])

    async def start(self, request: StartRollout) -> RolloutBody:
        """Starts a rollout, or starts it again with other settings and a new trial.

        Raises:
            InvalidRequest: The settings do not fit together.
            StoreUnavailable: The rollout cannot be stored. Nothing has changed.
        """

        def change(current: RolloutState | None) -> RolloutState:
            settings = _merge_settings(request, None if current is None else current.settings)
            self._check_settings(request.name, settings)
            previous = current or RolloutState(name=request.name, settings={}, trial=0)
            return previous.start(settings.to_json(), self._clock.wall_s())

        return await self._change(request.name, change)

    async def weigh(self, name: str, request: WeighRollout) -> RolloutBody:
        """Sets the canary's share; raises Conflict unless the rollout is running or switched."""

        def change(current: RolloutState) -> RolloutState:
            if current.phase not in (RolloutPhase.RUNNING, RolloutPhase.SWITCHED):
                raise Conflict(
                    f"The rollout {name} is {current.phase.replace('_', ' ')}. Start it again to try the canary."
                )
            shadow = current.shadow if request.shadow is None else request.shadow
            return current.with_weight(request.weight, shadow, self._clock.wall_s())

        return await self._change(name, lambda current: change(_require_existing(name, current)))

    async def switch(self, name: str) -> RolloutBody:
        """Moves all traffic to the canary, at once."""
        return await self._move(name, RolloutPhase.SWITCHED)

    async def promote(self, name: str) -> RolloutBody:
        """Moves all traffic to the canary for good."""
        return await self._move(name, RolloutPhase.PROMOTED)

    async def rollback(self, name: str) -> RolloutBody:
        """Moves all traffic to the stable version, at once."""
        return await self._move(name, RolloutPhase.ROLLED_BACK)

    async def end(self, name: str) -> RolloutBody:
        """Ends a rollout; raises Conflict if its name would lead to no model without it."""
        if self._names.resolve_model(name) is None:
            raise Conflict(
                f"Nothing would be served as {name} without its rollout. Roll it back, promote it, or remove it from "
                "routing.rollouts."
            )
        body = self.get(name)
        await self._store.change(name, lambda current: self._move_state(name, current, RolloutPhase.ENDED))
        await self._apply_change(name, RolloutPhase.ENDED)
        return msgspec.structs.replace(body, phase=RolloutPhase.ENDED, weight=0.0, shadow=0.0)

    async def _move(self, name: str, phase: RolloutPhase) -> RolloutBody:
        return await self._change(name, lambda current: self._move_state(name, current, phase))

    def _move_state(self, name: str, current: RolloutState | None, phase: RolloutPhase) -> RolloutState:
        return _require_existing(name, current).with_phase(phase, self._clock.wall_s(), "an operator decided so")

    async def _change(self, name: str, change: RolloutChange) -> RolloutBody:
        state = await self._store.change(name, change)
        await self._apply_change(name, state.phase)
        return self.get(name)

    async def _apply_change(self, name: str, phase: RolloutPhase) -> None:
        """Applies a change that was stored, and logs it."""
        self._unstored.pop(name, None)
        await self.refresh()
        self._count_decision(name, phase)
        log.info("The rollout %s is %s: an operator decided so.", name, phase)

    def _check_settings(self, name: str, config: RolloutConfig) -> None:
        """Raises InvalidRequest if the settings or the name of a rollout are invalid."""
        if name not in self._live and self._names.resolve(name) is None and not self._names.is_alias(name):
            raise InvalidRequest(
                f"No such model: {name[:200]!r}. A rollout begins behind a name that is served; a new name is given "
                "one in routing.rollouts.",
                param="name",
            )
        for key, message in rollout_faults(name, config, self._names, self._live):
            raise InvalidRequest(f"{key or name} {message[0].lower()}{message[1:]}", param=key or "name")

    def _apply(self, states: Sequence[RolloutState]) -> None:
        """Applies the stored states and the decisions that are not stored yet."""
        applicable = []
        for state in states:
            if (decided := self._unstored.get(state.name)) is not None:
                state = _resolve_conflict(state, decided)
            config = msgspec.convert(state.settings, RolloutConfig)
            if state.phase is not RolloutPhase.ENDED and any(
                self._names.resolve_model(model) is None for model in (config.stable, config.canary)
            ):
                if state.name in self._live:
                    log.warning("The rollout %s names a model that is not served here. It is left out.", state.name)
                continue
            applicable.append(state)
        self._live.apply_states(applicable)
        self._names.rollout_models = self._live.default_models

    def _log_change(self, state: RolloutState) -> None:
        self._count_decision(state.name, state.phase)
        level = logging.WARNING if state.phase is RolloutPhase.ABORTED else logging.INFO
        extra = {"rollout": state.name, "phase": str(state.phase), "why": state.why}
        log.log(level, "The rollout %s is %s: %s.", state.name, state.phase, state.why, extra=extra)

    def _count_decision(self, name: str, phase: RolloutPhase) -> None:
        self.decisions[name, phase] = self.decisions.get((name, phase), 0) + 1


def _resolve_conflict(current: RolloutState | None, decided: RolloutState) -> RolloutState:
    """Returns the trial's decision, unless its trial is over for another reason; then the stored state."""
    if current is not None and (current.trial != decided.trial or current.phase is not RolloutPhase.RUNNING):
        return current
    return decided


def _require_existing(name: str, current: RolloutState | None) -> RolloutState:
    if current is None or current.phase is RolloutPhase.ENDED:
        raise _not_found(name)
    return current


def _not_found(name: str) -> ResourceNotFound:
    return ResourceNotFound(f"There is no rollout {name[:200]!r}. GET /admin/v1/rollouts lists them.", param="name")


def _merge_settings(request: StartRollout, previous: Mapping[str, Any] | None) -> RolloutConfig:
    """Merges the settings of a rollout that starts: its previous settings, and those of the request."""
    changes = {
        field: value
        for field, value in msgspec.structs.asdict(request).items()
        if field != "name" and value is not msgspec.UNSET
    }
    settings = {"stable": request.name, **(previous or {}), **changes}
    settings["trial"] = {**((previous or {}).get("trial") or {}), **changes.get("trial", {})}
    if unknown := sorted(settings["trial"].keys() - set(TrialConfig.__struct_fields__)):
        raise InvalidRequest(
            f"trial has no {unknown[0][:100]!r}. It has {', '.join(TrialConfig.__struct_fields__)}.", param="trial"
        )
    if "canary" not in settings:
        raise InvalidRequest("Say which model is to be tried: canary must be set.", param="canary")
    try:
        return msgspec.convert(settings, RolloutConfig)
    except msgspec.ValidationError as error:
        sentence, _, path = str(error).partition(" - at ")
        raise InvalidRequest(f"{sentence}.", param=path.strip("`").removeprefix("$.") or None) from None


def _body(rollout: LiveRollout) -> RolloutBody:
    state, config, result = rollout.state, rollout.config, rollout.result()
    return RolloutBody(
        name=state.name,
        stable=config.stable,
        canary=config.canary,
        phase=state.phase,
        weight=state.weight,
        shadow=state.shadow,
        regions=list(config.regions),
        sticky=config.sticky,
        automatic=config.automatic,
        why=state.why,
        changed_at=to_iso(state.changed_s),
        stable_requests=result.stable_requests,
        canary_requests=result.canary_requests,
        verdict=result.decision,
        faults=[str(fault) for fault in result.faults],
        unproven=[str(fault) for fault in result.unproven],
        evidence={str(fault): round(share, 3) for fault, share in rollout.trial.evidence().items()},
    )
