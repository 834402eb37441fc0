"""A rollout as everybody knows it: two versions behind one name, how their requests are shared, and what was decided.

::

    running --switch--> switched          rollback, abort: from anywhere --> rolled_back, aborted
       |    <--weight--                   start: from anywhere, with a new trial --> running
       +-----promote---> promoted         end: from anywhere --> ended

Only `running` has a trial. Whoever is rolled back, aborted or ended stays so until somebody starts it again.
"""

from enum import StrEnum
from typing import Any

import msgspec


class RolloutVersion(StrEnum):
    """Which of the two."""

    STABLE = "stable"
    """The one that has been serving."""
    CANARY = "canary"
    """The one that is being tried."""


class RolloutPhase(StrEnum):
    """Phase of a rollout: what it is doing."""

    RUNNING = "running"
    """The canary is on trial."""
    SWITCHED = "switched"
    """The canary serves everybody, and the stable version stands ready."""
    PROMOTED = "promoted"
    """The canary serves everybody: it has proved itself, or somebody has decided so."""
    ROLLED_BACK = "rolled_back"
    """Somebody has given everybody back to the stable version."""
    ABORTED = "aborted"
    """The trial has."""
    ENDED = "ended"
    """The name leads where it leads without a rollout."""


class RolloutArm(msgspec.Struct, frozen=True):
    """Which side of a rollout a request is on."""

    rollout: str
    version: RolloutVersion
    tried: bool = True
    """Whether it says something of the versions: it could have gone to either."""

    def __str__(self) -> str:
        return f"{self.rollout}={self.version}"


class RolloutState(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout, as it is kept in the store and known to every gateway."""

    name: str
    """What requests ask for."""
    settings: dict[str, Any]
    """Those of `maitred.routing.rollout.config.RolloutConfig`, as JSON has them."""
    phase: RolloutPhase = RolloutPhase.RUNNING
    weight: float = 0.0
    """Share of the keys that the canary serves."""
    shadow: float = 0.0
    """Share of the stable version's requests that are copied to the canary."""
    trial: int = 1
    """Number of the trial: evidence belongs to one."""
    why: str = ""
    """The reason of the last change, where there is one."""
    changed_s: float = 0.0
    """Wall time of the last change."""

    def start(self, settings: dict[str, Any], now_s: float) -> "RolloutState":
        """On trial from the beginning, with these settings."""
        return _change(
            self,
            now_s,
            settings=settings,
            phase=RolloutPhase.RUNNING,
            weight=settings.get("weight", 0.0),
            shadow=settings.get("shadow", 0.0),
            trial=self.trial + 1,
        )

    def with_weight(self, weight: float, shadow: float, now_s: float) -> "RolloutState":
        """With other shares. The trial goes on, unless it begins or ceases to compare answers, or was over."""
        same = self.phase is RolloutPhase.RUNNING and (shadow > 0) == (self.shadow > 0)
        trial = self.trial if same else self.trial + 1
        return _change(self, now_s, phase=RolloutPhase.RUNNING, weight=weight, shadow=shadow, trial=trial)

    def with_phase(self, phase: RolloutPhase, now_s: float, why: str = "") -> "RolloutState":
        """In another phase: one version serves everybody, and nothing is copied."""
        weight = 1.0 if phase in (RolloutPhase.SWITCHED, RolloutPhase.PROMOTED) else 0.0
        return _change(self, now_s, phase=phase, weight=weight, shadow=0.0, why=why)


def _change(state: RolloutState, now_s: float, **changes: object) -> RolloutState:
    return msgspec.structs.replace(state, **({"why": "", "changed_s": now_s} | changes))
