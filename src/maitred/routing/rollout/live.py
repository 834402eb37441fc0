"""The rollouts of one gateway: who gets which version, and what its trial has seen. Pure.

What was decided is the `RolloutState` that all gateways share; what was seen, each gateway knows of its own requests.
"""

from collections.abc import Iterable

import msgspec

from maitred.core.rollout import RolloutPhase, RolloutState, RolloutVersion
from maitred.routing.rollout.config import RolloutConfig
from maitred.routing.rollout.observations import OrderedObservations, PendingObservation
from maitred.routing.rollout.split import Split
from maitred.routing.rollout.trial import CanaryTrial, TrialDecision, TrialObservation, TrialVerdict


class LiveRollout:
    """One of them.

    Args:
        state: What was decided.

    Attributes:
        state: As of now.
        config: Its settings.
        split: How requests are shared.
        trial: What was seen.
        requests: Version -> requests that have ended on trial, of all trials.
    """

    def __init__(self, state: RolloutState) -> None:
        self.requests = dict.fromkeys(RolloutVersion, 0)
        self._follow(state)
        self._start_trial()

    def apply_state(self, state: RolloutState) -> None:
        """Follows a decision; the trial begins anew if that is what was decided."""
        before = self.state
        self._follow(state)
        if (state.trial, state.settings) != (before.trial, before.settings):
            self._start_trial()

    def _follow(self, state: RolloutState) -> None:
        self.state = state
        self.config = msgspec.convert(state.settings, RolloutConfig)
        self.split = Split(rollout=state.name, weight=state.weight, shadow=state.shadow)

    def _start_trial(self) -> None:
        self.trial = CanaryTrial(self.config.trial.rules(compares=self.state.shadow > 0))
        self._observations = OrderedObservations(self._observe, self.config.trial.patience_s)

    def _observe(self, version: RolloutVersion, seen: TrialObservation) -> None:
        self.requests[version] += 1
        self._weigh(version, seen)

    def _weigh(self, version: RolloutVersion, seen: TrialObservation) -> None:
        """Puts it beside what was seen before. What ends after a decision is no evidence for it or against it."""
        if self.on_trial:
            self.trial.observe(version, seen)

    @property
    def on_trial(self) -> bool:
        """Whether what is seen counts."""
        return self.state.phase is RolloutPhase.RUNNING

    @property
    def main(self) -> str:
        """The model of whoever is on neither side."""
        return self.config.canary if self.state.weight >= 1 else self.config.stable

    def enter(self, entry: PendingObservation) -> None:
        """A request begins that is on trial."""
        self._observations.enter(entry)

    def advance(self, now_s: float) -> TrialDecision:
        """Takes into account what has ended; what follows from it."""
        told = self._observations.advance(now_s)
        return self.verdict().decision if told and self.on_trial else TrialDecision.CONTINUE

    def compared(self, seen: TrialObservation) -> TrialDecision:
        """Takes a copy into account, which has ended; what follows from it."""
        self._weigh(RolloutVersion.CANARY, seen)
        return self.verdict().decision if self.on_trial else TrialDecision.CONTINUE

    def verdict(self) -> TrialVerdict:
        """What is to be said of the canary so far."""
        return self.trial.verdict()


class LiveRollouts(dict[str, LiveRollout]):
    """All of them, by name, which every request asks for. Those that have ended are not among them."""

    @property
    def main(self) -> dict[str, str]:
        """Name -> the model of whoever is on neither side."""
        return {name: rollout.main for name, rollout in self.items()}

    def apply_states(self, states: Iterable[RolloutState]) -> None:
        """Follows what was decided of all of them; one that is not named is no more."""
        before = {**self}
        self.clear()
        for state in states:
            if state.phase is RolloutPhase.ENDED:
                continue
            live = before.get(state.name)
            if live is None:
                live = LiveRollout(state)
            elif live.state != state:
                live.apply_state(state)
            self[state.name] = live
