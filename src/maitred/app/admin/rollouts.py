"""Rollouts on this gateway: what operators and trials decide, kept in the store and followed at once.

A decision takes effect here before it is stored: a canary that is shown to be bad gets no further request, whether the
store answers or not. Other gateways follow within `_EVERY_S`. What was stored meanwhile by somebody else wins over a
verdict: it belonged to a trial that is over.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from maitred.core.clock import Clock
from maitred.core.errors import Conflict, InvalidRequest, ResourceNotFound, StoreUnavailable
from maitred.core.rollout import RolloutPhase, RolloutState
from maitred.observe.metrics.rollouts import RolloutsState
from maitred.routing.pools.names import ModelNames
from maitred.routing.rollout.config import RolloutConfig, TrialConfig
from maitred.routing.rollout.faults import rollout_faults
from maitred.routing.rollout.live import LiveRollout, LiveRollouts
from maitred.routing.rollout.trial import TrialDecision
from maitred.store.rollouts import Change
from maitred.wire.admin.requests import StartRollout, WeighRollout
from maitred.wire.admin.responses import RolloutBody
from maitred.wire.admin.times import iso_of

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_PHASES = {TrialDecision.ABORT: RolloutPhase.ABORTED, TrialDecision.PROMOTE: RolloutPhase.PROMOTED}


class RolloutPersistence(Protocol):
    """Keeps them; `maitred.store.rollouts` is the one that serves. Every method may raise StoreUnavailable."""

    async def all(self) -> list[RolloutState]:
        """As they are."""
        ...

    async def change(self, name: str, change: Change) -> RolloutState:
        """Makes one what `change` says."""
        ...

    async def declare(self, declared: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes over what the configuration says."""
        ...


class RolloutAdmin:
    """Implements `maitred.api.admin.rollouts.RolloutService`. Its `run` must be running.

    Args:
        store: Where decisions are kept.
        live: What this gateway goes by.
        names: The table of names, which is told of every change.
        clock: The time.
        every_s: Time between two looks at the store.
    """

    def __init__(
        self,
        store: RolloutPersistence,
        live: LiveRollouts,
        names: ModelNames,
        clock: Clock,
        *,
        every_s: float = _EVERY_S,
    ) -> None:
        self._store = store
        self._live = live
        self._names = names
        self._clock = clock
        self._every_s = every_s
        self._decided: dict[str, RolloutState] = {}
        """Verdicts that are not in the store yet."""
        self._news = asyncio.Event()
        self.decisions: dict[tuple[str, str], int] = {}
        """Rollout and phase -> how often this gateway has decided so."""

    async def open(self, declared: Mapping[str, RolloutConfig]) -> None:
        """Takes over what the configuration says, and what was decided before.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        self.adopt(self._names, await self.declare(declared))

    async def declare(self, declared: Mapping[str, RolloutConfig]) -> list[RolloutState]:
        """Puts what the configuration says into the store; returns what is decided then.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        await self._store.declare({name: config.as_json() for name, config in declared.items()})
        return await self._store.all()

    def adopt(self, names: ModelNames, states: Sequence[RolloutState] | None = None) -> None:
        """Goes by another table of names from now on.

        Args:
            names: The table.
            states: What is decided; None: what was known to be.
        """
        self._names = names
        self._become([rollout.state for rollout in self._live.values()] if states is None else states)

    async def run(self) -> None:
        """Follows what is decided elsewhere, and stores what is decided here, until it is cancelled."""
        away = False
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._news.wait()
            self._news.clear()
            for rollout in self._live.values():
                self.follow(rollout, rollout.advance(self._clock.monotonic_s()))
            try:
                await self.keep_up()
                away = False
            except StoreUnavailable as error:
                if not away:
                    log.warning("Rollouts are kept as they are: %s", error.message)
                away = True
                await asyncio.sleep(self._every_s)

    async def keep_up(self) -> None:
        """Stores what was decided here, then follows what is in the store.

        Raises:
            StoreUnavailable: It cannot be reached. What was decided here holds nevertheless, and is stored later.
        """
        for name, decided in list(self._decided.items()):
            await self._store.change(name, lambda now, decided=decided: _unless_overtaken(now, decided))  # type: ignore[misc]
            self._decided.pop(name, None)
        self._become(await self._store.all())

    def follow(self, rollout: LiveRollout, decision: TrialDecision) -> None:
        """Does what the trial says, as far as it may."""
        state, automatic = rollout.state, rollout.config.automatic
        phase = _PHASES.get(decision)
        if phase is None or automatic == "none" or (phase is RolloutPhase.PROMOTED and automatic != "promote"):
            return
        verdict = rollout.verdict()
        why = ", ".join(verdict.faults) or f"as good as {rollout.config.stable}"
        decided = state.moved(phase, self._clock.wall_s(), f"{why}, after {verdict.canary_requests} requests")
        self._decided[state.name] = decided
        rollout.become(decided)
        self._names.rollouts = self._live.main
        self._say(decided)
        self._news.set()

    def state(self, copies: Mapping[tuple[str, str], int]) -> RolloutsState:
        """For metrics.

        Args:
            copies: Rollout and end -> copies.
        """
        live = self._live.items()
        return RolloutsState(
            weight={name: rollout.state.weight for name, rollout in live},
            requests={(name, version): n for name, rollout in live for version, n in rollout.requests.items()},
            evidence={
                (name, fault): share for name, rollout in live for fault, share in rollout.trial.evidence().items()
            },
            copies=copies,
            decisions=self.decisions,
        )

    # --- what operators say ---

    def all(self) -> list[RolloutBody]:
        """Every rollout that has not ended, by name."""
        return [_body(rollout) for _, rollout in sorted(self._live.items())]

    def get(self, name: str) -> RolloutBody:
        """One of them; raises ResourceNotFound."""
        if name not in self._live:
            raise _not_found(name)
        return _body(self._live[name])

    async def start(self, request: StartRollout) -> RolloutBody:
        """Begins one, or begins one again with other settings; its trial begins anew.

        Raises:
            InvalidRequest: The settings do not fit together.
            StoreUnavailable: It cannot be kept. Nothing has changed.
        """

        def change(now: RolloutState | None) -> RolloutState:
            settings = _settings(request, None if now is None else now.settings)
            self._check(request.name, settings)
            blank = now or RolloutState(name=request.name, settings={}, trial=0)
            return blank.started(settings.as_json(), self._clock.wall_s())

        return await self._change(request.name, change)

    async def weigh(self, name: str, request: WeighRollout) -> RolloutBody:
        """Gives the canary another share; raises Conflict where it is not on trial or switched to."""

        def change(now: RolloutState) -> RolloutState:
            if now.phase not in (RolloutPhase.RUNNING, RolloutPhase.SWITCHED):
                raise Conflict(
                    f"The rollout {name} is {now.phase.replace('_', ' ')}. Start it again to try the canary."
                )
            shadow = now.shadow if request.shadow is None else request.shadow
            return now.weighed(request.weight, shadow, self._clock.wall_s())

        return await self._change(name, lambda now: change(_known(name, now)))

    async def switch(self, name: str) -> RolloutBody:
        """Everybody to the canary, at once."""
        return await self._move(name, RolloutPhase.SWITCHED)

    async def promote(self, name: str) -> RolloutBody:
        """The same for good."""
        return await self._move(name, RolloutPhase.PROMOTED)

    async def rollback(self, name: str) -> RolloutBody:
        """Everybody to the stable version, at once."""
        return await self._move(name, RolloutPhase.ROLLED_BACK)

    async def end(self, name: str) -> RolloutBody:
        """No rollout any more; raises Conflict where the name leads nowhere without it."""
        if self._names.model(name) is None:
            raise Conflict(
                f"Nothing would be served as {name} without its rollout. Roll it back, promote it, or remove it from "
                "routing.rollouts."
            )
        body = self.get(name)
        await self._store.change(name, lambda now: self._moved(name, now, RolloutPhase.ENDED))
        await self._followed(name, RolloutPhase.ENDED)
        return msgspec.structs.replace(body, phase=RolloutPhase.ENDED, weight=0.0, shadow=0.0)

    async def _move(self, name: str, phase: RolloutPhase) -> RolloutBody:
        return await self._change(name, lambda now: self._moved(name, now, phase))

    def _moved(self, name: str, now: RolloutState | None, phase: RolloutPhase) -> RolloutState:
        return _known(name, now).moved(phase, self._clock.wall_s(), "an operator decided so")

    async def _change(self, name: str, change: Change) -> RolloutBody:
        state = await self._store.change(name, change)
        await self._followed(name, state.phase)
        return self.get(name)

    async def _followed(self, name: str, phase: RolloutPhase) -> None:
        """Applies a change that was stored, and says so."""
        self._decided.pop(name, None)
        await self.keep_up()
        self._count(name, phase)
        log.info("The rollout %s is %s: an operator decided so.", name, phase)

    def _check(self, name: str, config: RolloutConfig) -> None:
        """Raises InvalidRequest if there can be no such rollout."""
        if name not in self._live and self._names.find(name) is None and not self._names.is_alias(name):
            raise InvalidRequest(
                f"No such model: {name[:200]!r}. A rollout begins behind a name that is served; a new name is given "
                "one in routing.rollouts.",
                param="name",
            )
        for key, message in rollout_faults(name, config, self._names, self._live):
            raise InvalidRequest(f"{key or name} {message[0].lower()}{message[1:]}", param=key or "name")

    def _become(self, states: Sequence[RolloutState]) -> None:
        """Follows the store, and what is not there yet."""
        fitting = []
        for state in states:
            if (decided := self._decided.get(state.name)) is not None:
                state = _unless_overtaken(state, decided)
            config = msgspec.convert(state.settings, RolloutConfig)
            if state.phase is not RolloutPhase.ENDED and any(
                self._names.model(model) is None for model in (config.stable, config.canary)
            ):
                if state.name in self._live:
                    log.warning("The rollout %s names a model that is not served here. It is left out.", state.name)
                continue
            fitting.append(state)
        self._live.become(fitting)
        self._names.rollouts = self._live.main

    def _say(self, state: RolloutState) -> None:
        self._count(state.name, state.phase)
        level = logging.WARNING if state.phase is RolloutPhase.ABORTED else logging.INFO
        extra = {"rollout": state.name, "phase": str(state.phase), "why": state.why}
        log.log(level, "The rollout %s is %s: %s.", state.name, state.phase, state.why, extra=extra)

    def _count(self, name: str, phase: RolloutPhase) -> None:
        self.decisions[name, phase] = self.decisions.get((name, phase), 0) + 1


def _unless_overtaken(now: RolloutState | None, decided: RolloutState) -> RolloutState:
    """A verdict, unless its trial is over for another reason."""
    if now is not None and (now.trial != decided.trial or now.phase is not RolloutPhase.RUNNING):
        return now
    return decided


def _known(name: str, now: RolloutState | None) -> RolloutState:
    if now is None or now.phase is RolloutPhase.ENDED:
        raise _not_found(name)
    return now


def _not_found(name: str) -> ResourceNotFound:
    return ResourceNotFound(f"There is no rollout {name[:200]!r}. GET /admin/v1/rollouts lists them.", param="name")


def _settings(request: StartRollout, before: Mapping[str, Any] | None) -> RolloutConfig:
    """The settings of one that begins: those it had, and what is said now."""
    said = {
        field: value
        for field, value in msgspec.structs.asdict(request).items()
        if field != "name" and value is not msgspec.UNSET
    }
    settings = {"stable": request.name, **(before or {}), **said}
    settings["trial"] = {**((before or {}).get("trial") or {}), **said.get("trial", {})}
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
    state, config, verdict = rollout.state, rollout.config, rollout.verdict()
    return RolloutBody(
        name=state.name,
        stable=config.stable,
        canary=config.canary,
        phase=state.phase,
        weight=state.weight,
        shadow=state.shadow,
        sticky=config.sticky,
        automatic=config.automatic,
        why=state.why,
        changed_at=iso_of(state.changed_s),
        stable_requests=verdict.stable_requests,
        canary_requests=verdict.canary_requests,
        verdict=verdict.decision,
        faults=[str(fault) for fault in verdict.faults],
        unproven=[str(fault) for fault in verdict.unproven],
        evidence={str(fault): round(share, 3) for fault, share in rollout.trial.evidence().items()},
    )
