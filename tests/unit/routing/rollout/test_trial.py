"""Trials of canaries: what is wrong with them is found, what is not is let through."""

import random

import pytest

from maitred.core.rollout import RolloutVersion
from maitred.routing.rollout.trial import CanaryFault, CanaryTrial, TrialDecision, TrialObservation, TrialRules


def seen(chance, *, slower=1.0, stutter=1.0, failing=0.005, refusing=0.01, longer=1.0, disagreeing=0.01):
    """A request of a version with these ways."""
    if chance.random() < refusing:
        return TrialObservation(refused=True)
    if chance.random() < failing:
        return TrialObservation(failed=True)
    return TrialObservation(
        ttft_s=slower * chance.lognormvariate(-1.2, 0.4),
        itl_s=stutter * chance.lognormvariate(-3.5, 0.3),
        tokens=round(longer * chance.lognormvariate(5.0, 0.6)),
        agreed=chance.random() >= disagreeing,
    )


def tried(seed=0, *, rules=TrialRules(), most=40_000, **canary):  # noqa: B008 - frozen
    """The verdict that ends the trial, or the last one."""
    chance, trial = random.Random(seed), CanaryTrial(rules)
    for _ in range(most):
        if chance.random() < 0.2:
            trial.observe(RolloutVersion.CANARY, seen(chance, **canary))
            verdict = trial.result()
            if verdict.decision is not TrialDecision.CONTINUE:
                return verdict
        else:
            trial.observe(RolloutVersion.STABLE, seen(chance))
    return trial.result()


def test_a_good_canary_is_promoted():
    verdict = tried()
    assert verdict.decision is TrialDecision.PROMOTE
    assert verdict.faults == verdict.unproven == ()
    assert verdict.canary_requests >= TrialRules().least_requests


@pytest.mark.parametrize(
    ("canary", "fault"),
    [
        ({"slower": 1.3}, CanaryFault.TTFT),
        ({"stutter": 1.3}, CanaryFault.ITL),
        ({"failing": 0.05}, CanaryFault.ERRORS),
        ({"refusing": 0.08}, CanaryFault.REFUSALS),
        ({"longer": 1.5}, CanaryFault.WORDY),
        ({"longer": 0.6}, CanaryFault.TERSE),
        ({"disagreeing": 0.2}, CanaryFault.DISAGREEMENT),
    ],
)
def test_what_is_wrong_is_found_and_named(canary, fault):
    verdict = tried(**canary)
    assert verdict.decision is TrialDecision.ABORT
    assert verdict.faults == (fault,)


def test_a_canary_that_is_better_is_promoted():
    assert tried(slower=0.7, stutter=0.7, failing=0.0, refusing=0.0, disagreeing=0.0).decision is TrialDecision.PROMOTE


def test_load_that_both_suffer_from_excuses_both():
    chance, trial = random.Random(5), CanaryTrial(TrialRules())
    for count in range(20_000):
        slower = 1.0 if count < 2000 else 3.0
        version = RolloutVersion.CANARY if chance.random() < 0.2 else RolloutVersion.STABLE
        trial.observe(version, seen(chance, slower=slower, stutter=slower))
        assert not trial.result().faults


def test_nothing_is_promoted_that_was_not_seen():
    chance, trial = random.Random(1), CanaryTrial(TrialRules())
    for _ in range(3000):
        trial.observe(RolloutVersion.STABLE, seen(chance))
    assert trial.result().decision is TrialDecision.CONTINUE
    assert set(trial.result().unproven) == set(CanaryFault)
    for _ in range(20):
        trial.observe(RolloutVersion.CANARY, seen(chance))
    assert trial.result().decision is TrialDecision.CONTINUE


def test_answers_that_are_not_compared_hold_nothing_up():
    def uncompared(chance):
        return TrialObservation(ttft_s=chance.random(), itl_s=chance.random(), tokens=100 + chance.randrange(20))

    for rules, decision in (
        (TrialRules(), TrialDecision.CONTINUE),
        (TrialRules(disagreeing=None), TrialDecision.PROMOTE),
    ):
        chance, trial = random.Random(2), CanaryTrial(rules)
        for _ in range(4000):
            trial.observe(RolloutVersion.STABLE, uncompared(chance))
            trial.observe(RolloutVersion.CANARY, uncompared(chance))
        verdict = trial.result()
        assert verdict.decision is decision
        assert verdict.unproven == (() if decision is TrialDecision.PROMOTE else (CanaryFault.DISAGREEMENT,))


def test_the_evidence_tells_how_near_an_abort_is():
    chance, trial = random.Random(4), CanaryTrial(TrialRules())
    while not trial.result().faults:
        assert max(trial.evidence().values()) < 1
        trial.observe(RolloutVersion.STABLE, seen(chance))
        trial.observe(RolloutVersion.CANARY, seen(chance, failing=0.2))
    assert trial.evidence()[CanaryFault.ERRORS] >= 1
