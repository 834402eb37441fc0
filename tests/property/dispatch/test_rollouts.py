"""Whatever the weights: who has seen the canary keeps it while its weight grows, and nobody goes where it may not."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.app.models.router import Router, read_routes
from maitred.config.tree import Config
from maitred.core.inference import InferenceRequest
from maitred.core.request import SamplingParams
from maitred.core.rollout import RolloutPhase, RolloutState, RolloutVersion
from maitred.core.tenancy import Principal
from maitred.routing.catalog import Catalog, ServedModel
from maitred.routing.config import RoutingConfig
from maitred.routing.pools.config import PoolConfig, RoutesConfig, TargetConfig
from maitred.routing.pools.requirements import RequestRequirements, find_exclusion
from maitred.routing.pools.route_table import RoutingTable, TargetReason, VersionSplit
from maitred.routing.rollout.config import RolloutConfig
from maitred.routing.rollout.live import LiveRollouts
from tests.property.wire.test_routes import CAPABILITIES, FAILURES, REGIONS

SHARES = st.floats(0, 1)
SESSIONS = st.lists(st.text(max_size=8), min_size=1, max_size=20)


def state(weight, **settings):
    config = RolloutConfig(**{"stable": "v1", "canary": "v2", "sticky": "session", **settings})
    return RolloutState(name="chat", settings=config.to_json(), weight=weight)


def router(live):
    catalog = Catalog([ServedModel(name, [], None) for name in ("v1", "v2")])
    rollouts = {"chat": RolloutConfig(stable="v1", canary="v2")}
    config = Config(routing=RoutingConfig(rollouts=rollouts, aliases={"gpt": "chat"}))
    return Router(catalog, read_routes(config, catalog), live)


def caller(key, organisation="acme"):
    return Principal(key=key, tenants=(organisation,), scopes=frozenset())


def sides(of, sessions, name="chat", key="k"):
    asks = [
        InferenceRequest(name, ["Hi"], SamplingParams(max_tokens=1, seed=0), session=session) for session in sessions
    ]
    return [of.route(ask, caller(key)).arm.version for ask in asks]


@given(st.lists(SHARES, min_size=2, max_size=5), SESSIONS)
def test_a_growing_weight_takes_nobody_from_the_canary_and_a_rollback_takes_all(weights, sessions):
    live = LiveRollouts()
    routes = router(live)
    before = set()
    for weight in sorted(weights):
        live.apply_states([state(weight)])
        now = {i for i, side in enumerate(sides(routes, sessions)) if side is RolloutVersion.CANARY}
        assert before <= now
        assert sides(routes, sessions, "gpt") == sides(routes, sessions)
        before = now
    live.apply_states([live["chat"].state.with_phase(RolloutPhase.SWITCHED, 0.0)])
    assert set(sides(routes, sessions)) == {RolloutVersion.CANARY}
    live.apply_states([live["chat"].state.with_phase(RolloutPhase.ROLLED_BACK, 0.0)])
    assert set(sides(routes, sessions)) == {RolloutVersion.STABLE}


@given(SHARES, st.text(max_size=8), SESSIONS)
def test_all_requests_of_a_key_are_on_one_side_whatever_their_sessions(weight, key, sessions):
    live = LiveRollouts()
    live.apply_states([state(weight, sticky="key")])
    assert len(set(sides(router(live), sessions, key=key))) == 1


@given(
    st.fixed_dictionaries(
        {
            name: st.builds(
                PoolConfig,
                capabilities=st.none() | st.lists(CAPABILITIES, unique=True),
                local=st.booleans(),
                region=st.none() | REGIONS,
            )
            for name in ("v1", "v2")
        }
    ),
    st.builds(
        RequestRequirements,
        model=st.sampled_from(["chat", "v1", "v2"]),
        capabilities=st.sets(CAPABILITIES),
        local_only=st.booleans(),
        regions=st.none() | st.sets(REGIONS),
        allowed=st.sampled_from([lambda name: True, {"chat"}.__contains__, {"v1"}.__contains__, {"v2"}.__contains__]),
    ),
    st.sampled_from(RolloutVersion),
    FAILURES,
)
def test_bounds_hold_for_both_versions_and_the_stable_one_follows_the_canary(pools, needs, version, failures):
    table = RoutesConfig(pools=pools, names={name: [TargetConfig(pool=name)] for name in pools})
    plan = RoutingTable(table).route_by_rollout(needs, VersionSplit("chat", "v1", "v2", version))
    named = needs.allowed("chat") or needs.allowed(needs.model)
    opened = [name for name in pools if named or needs.allowed(name)]
    if plan is None:
        assert opened == []
        return
    fitting = [name for name in opened if find_exclusion(pools[name], needs) is None]
    assert plan.arm.tried == (len(fitting) == 2)
    if not fitting:
        return
    visited, copy = [plan.first_target()], plan.shadow_target
    for failure in failures:
        if (target := plan.next_target(failure)) is None:
            break
        visited.append(target)
    wanted = "v1" if version is RolloutVersion.STABLE else "v2"
    first = wanted if wanted in fitting else fitting[0]
    behind = ["v1"] if first == "v2" and "v1" in fitting else []
    assert [target.pool for target in visited] == [first, *behind]
    assert [target.reason for target in visited] == [TargetReason.OWN, TargetReason.STABLE][: len(visited)]
    assert (copy is not None) == (first == "v1" and "v2" in fitting)
    assert copy is None or copy.pool == "v2"
