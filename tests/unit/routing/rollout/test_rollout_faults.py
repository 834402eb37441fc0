"""Rollouts that lead nowhere are found before they begin."""

import pytest

from maitred.routing.auto.config import AutoConfig
from maitred.routing.pools.config import PoolConfig, RoutesConfig, TargetConfig
from maitred.routing.pools.faults import route_faults
from maitred.routing.rollout.config import RolloutConfig, TrialConfig

NAMES = {name: [TargetConfig(pool=name)] for name in ("v1", "v2", "v3")}


def faults(rollouts, **more):
    auto = {"auto": AutoConfig(small="v1", medium="v1", large="v2")}
    table = RoutesConfig(pools=dict.fromkeys(NAMES, PoolConfig()), names=NAMES, rollouts=rollouts, auto=auto, **more)
    return dict(route_faults(table))


def test_a_new_name_and_the_name_of_the_stable_model_are_sound():
    rollouts = {"chat": RolloutConfig(stable="v1", canary="v2"), "v3": RolloutConfig(stable="v3", canary="gpt")}
    assert faults(rollouts, aliases={"gpt": "v2", "talk": "chat"}) == {}


@pytest.mark.parametrize(
    ("name", "stable", "canary", "key", "message"),
    [
        ("chat", "v1", "v9", ".canary", "No such model: 'v9'. There are: auto, chat, gpt, v1, v2, v3."),
        ("chat", "v1", "v1", ".canary", "Is the stable model. Name the one that is to be tried."),
        ("chat", "v1", "gpt", ".canary", "Is the stable model. Name the one that is to be tried."),
        ("v2", "v1", "v2", ".canary", "Is the name of the rollout itself. Name the new model."),
        ("gpt", "v1", "v2", "", "Is an alias. Name the rollout after the model itself: v1."),
        ("auto", "v1", "v2", "", "A model is chosen behind this name. Roll out one of those models instead."),
        ("chat", "auto", "v2", ".stable", "A model is chosen behind this name. Name one of its models instead."),
        ("v*", "v1", "v2", "", "Has a `*`. Give it one name."),
    ],
)
def test_what_is_wrong(name, stable, canary, key, message):
    found = faults({name: RolloutConfig(stable=stable, canary=canary)}, aliases={"gpt": "v1"})
    assert found[f"routing.rollouts.{name}{key}"] == message


def test_no_rollout_stands_behind_another_one():
    rollouts = {"chat": RolloutConfig(stable="v1", canary="v2"), "next": RolloutConfig(stable="chat", canary="v3")}
    assert faults(rollouts) == {
        "routing.rollouts.next.stable": "Is the name of another rollout. Name one of its models: v1, v2."
    }


def test_tolerances_to_promote_and_to_abort_must_differ():
    trial = TrialConfig(slow_abort=0.1)
    found = faults({"chat": RolloutConfig(stable="v1", canary="v2", trial=trial)})
    assert list(found) == ["routing.rollouts.chat.trial.slow_promote"]
