"""Rollouts of one gateway: the version of each request, and the trials' observations; pure code.

All gateways share the decisions in `RolloutState`; each gateway has only the observations of its own requests.
"""

from collections.abc import Iterable

import msgspec

from maitred.core.rollout import RolloutPhase, RolloutState, RolloutVersion
from maitred.routing.rollout.config import RolloutConfig
from maitred.routing.rollout.observations import OrderedObservations, PendingObservation
from maitred.routing.rollout.split import TrafficSplit
from maitred.routing.rollout.trial import CanaryTrial, TrialDecision, TrialObservation, TrialResult


class LiveRollout:
    """Rollout that has not ended, with its trial.

    Args:
        state: Shared state, with the last decision.
        region: Region of this gateway; None: it is in no named region.

    Attributes:
        state: Shared state, with the last decision.
        config: Settings of the rollout.
        split: Split of the requests between the versions at this gateway; in a region that takes no part, the stable
            version serves all.
        trial: Trial of the canary.
        requests: Maps each version to its number of completed trial requests, over all trials.
    """

    def __init__(self, state: RolloutState, region: str | None = None) -> None:
        self._region = region
        self.requests = dict.fromkeys(RolloutVersion, 0)
        self._set_state(state)
        self._start_trial()

    def apply_state(self, state: RolloutState) -> None:
        """Applies a decision, and restarts the trial if the decision requires it."""
        previous = self.state
        self._set_state(state)
        if (state.trial, state.settings) != (previous.trial, previous.settings):
            self._start_trial()

    def _set_state(self, state: RolloutState) -> None:
        self.state = state
        self.config = msgspec.convert(state.settings, RolloutConfig)
        split = TrafficSplit(rollout=state.name, weight=state.weight, shadow=state.shadow)
        takes_part = not self.config.regions or self._region in self.config.regions
        self.split = split if takes_part else split.to_stable()

    def _start_trial(self) -> None:
        self.trial = CanaryTrial(self.config.trial.make_rules(compares=self.split.shadow > 0))
        self._observations = OrderedObservations(self._observe, self.config.trial.patience_s)

    def _observe(self, version: RolloutVersion, observation: TrialObservation) -> None:
        self.requests[version] += 1
        self._add_to_trial(version, observation)

    def _add_to_trial(self, version: RolloutVersion, observation: TrialObservation) -> None:
        """Adds an observation to the trial.

        A request that ends after a decision is no evidence for it or against it.
        """
        if self.is_on_trial:
            self.trial.observe(version, observation)

    @property
    def is_on_trial(self) -> bool:
        """Whether observations count for the trial."""
        return self.state.phase is RolloutPhase.RUNNING

    @property
    def default_model(self) -> str:
        """Model of requests that are on neither side of the rollout."""
        return self.config.canary if self.split.weight >= 1 else self.config.stable

    def add_pending(self, pending: PendingObservation) -> None:
        """Adds a trial request that begins."""
        self._observations.add(pending)

    def advance(self, now_s: float) -> TrialDecision:
        """Adds the requests that have ended to the trial, and returns the decision that follows."""
        observed_count = self._observations.advance(now_s)
        return self.result().decision if observed_count and self.is_on_trial else TrialDecision.CONTINUE

    def record_comparison(self, observation: TrialObservation) -> TrialDecision:
        """Adds a completed copied request to the trial, and returns the decision that follows."""
        self._add_to_trial(RolloutVersion.CANARY, observation)
        return self.result().decision if self.is_on_trial else TrialDecision.CONTINUE

    def result(self) -> TrialResult:
        """Returns the result of the trial so far."""
        return self.trial.result()


class LiveRollouts(dict[str, LiveRollout]):
    """Rollouts that have not ended, by the name that requests ask for.

    Args:
        region: Region of this gateway; None: it is in no named region.
    """

    def __init__(self, region: str | None = None) -> None:
        super().__init__()
        self._region = region

    @property
    def default_models(self) -> dict[str, str]:
        """Maps each name to the model of requests that are on neither side."""
        return {name: rollout.default_model for name, rollout in self.items()}

    def apply_states(self, states: Iterable[RolloutState]) -> None:
        """Applies the decisions on all rollouts, and removes rollouts that are not in the list."""
        previous = {**self}
        self.clear()
        for state in states:
            if state.phase is RolloutPhase.ENDED:
                continue
            live = previous.get(state.name)
            if live is None:
                live = LiveRollout(state, self._region)
            elif live.state != state:
                live.apply_state(state)
            self[state.name] = live
