"""Rollout state: two versions behind one model name, their traffic shares and the decision.

::

    running --switch--> switched          rollback, abort: from anywhere --> rolled_back, aborted
       |    <--weight--                   start: from anywhere, with a new trial --> running
       +-----promote---> promoted         end: from anywhere --> ended

Only the phase `running` has a trial. A rollout that is rolled back, aborted or ended stays so until an operator starts
it again.
"""

from enum import StrEnum
from typing import Any

import msgspec


class RolloutVersion(StrEnum):
    """Version of a model in a rollout."""

    STABLE = "stable"
    """The current version, which already serves."""
    CANARY = "canary"
    """The new version, which is on trial."""


class RolloutPhase(StrEnum):
    """Phase of a rollout."""

    RUNNING = "running"
    """The canary is on trial."""
    SWITCHED = "switched"
    """The canary serves all requests, and the stable version is on standby."""
    PROMOTED = "promoted"
    """The canary serves all requests after a successful trial or an operator's decision."""
    ROLLED_BACK = "rolled_back"
    """An operator has aborted the rollout: the stable version serves all requests."""
    ABORTED = "aborted"
    """The trial has failed: the stable version serves all requests."""
    ENDED = "ended"
    """The rollout is over: the model name resolves as without a rollout."""


class RolloutArm(msgspec.Struct, frozen=True):
    """Rollout arm of a request."""

    rollout: str
    version: RolloutVersion
    tried: bool = True
    """Whether the request counts as evidence: it could have gone to either version."""

    def __str__(self) -> str:
        return f"{self.rollout}={self.version}"


class RolloutState(msgspec.Struct, frozen=True, kw_only=True):
    """State of one rollout in the store and in every gateway."""

    name: str
    """Model name in the requests."""
    settings: dict[str, Any]
    """Settings of `maitred.routing.rollout.config.RolloutConfig` as JSON values."""
    phase: RolloutPhase = RolloutPhase.RUNNING
    weight: float = 0.0
    """Share of the caller keys that the canary serves."""
    shadow: float = 0.0
    """Share of the stable version's requests that are copied to the canary."""
    trial: int = 1
    """Number of the trial; evidence belongs to one trial."""
    why: str = ""
    """The reason of the last change, where there is one."""
    changed_s: float = 0.0
    """Wall time of the last change."""

    def start(self, settings: dict[str, Any], now_s: float) -> "RolloutState":
        """Returns a state with a new trial and these settings."""
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
        """Returns a state with other shares.

        The trial continues, unless the comparison of answers starts or stops, or the trial was over.
        """
        same = self.phase is RolloutPhase.RUNNING and (shadow > 0) == (self.shadow > 0)
        trial = self.trial if same else self.trial + 1
        return _change(self, now_s, phase=RolloutPhase.RUNNING, weight=weight, shadow=shadow, trial=trial)

    def with_phase(self, phase: RolloutPhase, now_s: float, why: str = "") -> "RolloutState":
        """Returns a state in another phase: one version serves all, and no request is copied."""
        weight = 1.0 if phase in (RolloutPhase.SWITCHED, RolloutPhase.PROMOTED) else 0.0
        return _change(self, now_s, phase=phase, weight=weight, shadow=0.0, why=why)


def _change(state: RolloutState, now_s: float, **changes: object) -> RolloutState:
    return msgspec.structs.replace(state, **({"why": "", "changed_s": now_s} | changes))
