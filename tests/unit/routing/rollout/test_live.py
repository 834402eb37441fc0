"""One rollout on a gateway: what it sees, and until when that counts."""

import json

import msgspec
import pytest

from maitred.core.rollout import RolloutPhase, RolloutState, RolloutVersion
from maitred.routing.rollout.config import RolloutConfig
from maitred.routing.rollout.live import LiveRollout, LiveRollouts
from maitred.routing.rollout.trial import CanaryFault, TrialDecision, TrialObservation

STATE = RolloutState(
    name="chat",
    settings={"stable": "v1", "canary": "v2", "shadow": 1.0},
    trial=1,
    phase=RolloutPhase.RUNNING,
    shadow=1.0,
)


def copied(*, agreed):
    return TrialObservation(copied=True, agreed=agreed)


def test_copies_that_end_after_the_verdict_do_not_change_it():
    rollout = LiveRollout(STATE)
    while rollout.record_comparison(copied(agreed=False)) is not TrialDecision.ABORT:
        pass
    verdict = rollout.result()
    assert verdict.faults == (CanaryFault.DISAGREEMENT,)
    rollout.apply_state(STATE.with_phase(RolloutPhase.ABORTED, 1.0, "disagreement"))
    for _ in range(1000):
        assert rollout.record_comparison(copied(agreed=True)) is TrialDecision.CONTINUE
    assert rollout.result() == verdict
    rollout.apply_state(rollout.state.start(STATE.settings, 2.0))
    assert rollout.result().canary_requests == 0
    assert rollout.record_comparison(copied(agreed=True)) is TrialDecision.CONTINUE
    assert rollout.result().canary_requests == 1


class TestRegions:
    STATE = RolloutState(
        name="chat",
        settings=RolloutConfig(stable="v1", canary="v2", regions=("eu", "us")).to_json(),
        phase=RolloutPhase.SWITCHED,
        weight=1.0,
    )

    @pytest.mark.parametrize(("region", "model"), [("eu", "v2"), ("us", "v2"), ("asia", "v1"), (None, "v1")])
    def test_only_gateways_of_its_regions_take_part(self, region, model):
        rollouts = LiveRollouts(region)
        rollouts.apply_states([self.STATE])
        assert rollouts.default_models == {"chat": model}
        assert {rollouts["chat"].split.version_for(str(key)) for key in range(20)} == {
            RolloutVersion.CANARY if model == "v2" else RolloutVersion.STABLE
        }

    def test_without_regions_all_take_part(self):
        rollouts = LiveRollouts("asia")
        rollouts.apply_states([msgspec.structs.replace(self.STATE, settings={"stable": "v1", "canary": "v2"})])
        assert rollouts.default_models == {"chat": "v2"}

    def test_settings_stay_the_same_through_the_store(self):
        assert json.loads(json.dumps(self.STATE.settings)) == self.STATE.settings
