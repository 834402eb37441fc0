"""One rollout on a gateway: what it sees, and until when that counts."""

from maitred.core.rollout import RolloutPhase, RolloutState
from maitred.routing.rollout.live import LiveRollout
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
