"""From a preference to a way: what is open, what bounds allow, and what stands behind it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.errors import ContentRefused, ContextLengthExceeded, Forbidden, ReplicaUnavailable
from maitred.routing.auto.config import AutoConfig
from maitred.routing.auto.tasks import Task
from maitred.routing.auto.tiers import AutoModel, TierPreference
from maitred.routing.pools.config import FallbackConfig, PoolConfig, RoutesConfig, TargetConfig
from maitred.routing.pools.faults import route_faults
from maitred.routing.pools.requirements import RequestRequirements
from maitred.routing.pools.route_table import RoutingTable

AUTO = AutoConfig(small="s", medium="m", large="big", tasks={Task.CODE: "code/x"})
CONFIG = RoutesConfig(
    pools={
        "s": PoolConfig(region="eu"),
        "m": PoolConfig(region="us"),
        "l": PoolConfig(local=False, region="us"),
        "spare": PoolConfig(),
    },
    names={
        **{name: [TargetConfig(pool=name)] for name in ("s", "m", "l", "spare")},
        "code/*": [TargetConfig(pool="l", model="*")],
    },
    aliases={"big": "l", "default": "auto"},
    fallbacks={"s": FallbackConfig(general=["spare"], content_policy=["m"])},
    auto={"auto": AUTO},
)
FROM_SMALL = TierPreference(("s", "m", "big"), (), "small", 0.1)
FROM_LARGE = TierPreference(("big",), ("m", "s"), "large", 0.9)


def make_plan(preference=FROM_SMALL, model="auto", **needs):
    return RoutingTable(CONFIG).route_by_preference(RequestRequirements(model, **needs), preference)


def names(plan, failure):
    target = plan.first_target()
    found = [target.name]
    while (target := plan.next_target(failure)) is not None:
        found.append(target.name)
    return found


def only(*allowed):
    return {"allowed": lambda name: name in allowed}


def test_the_chosen_ones_own_chain_comes_before_those_that_are_larger():
    assert names(make_plan(), ReplicaUnavailable()) == ["s", "spare", "m", "l"]
    assert names(make_plan(), ContextLengthExceeded("long")) == ["s", "m", "l"]
    assert names(make_plan(), ContentRefused()) == ["s", "m"]
    assert names(make_plan(FROM_LARGE), ReplicaUnavailable()) == ["l"], "nobody is given less than what it is for"
    chosen = make_plan(model="default").selection
    assert (chosen.name, chosen.model, chosen.reason, chosen.score) == ("auto", "s", "small", 0.1)


def test_a_name_needs_permission_and_so_does_the_model():
    assert names(make_plan(**only("auto", "m", "l")), ReplicaUnavailable()) == ["m", "l"]
    assert names(make_plan(**only("auto", "big")), ReplicaUnavailable()) == ["l"], "under its alias"
    assert names(make_plan(FROM_LARGE, **only("auto", "s", "m")), ReplicaUnavailable()) == ["m", "s"]
    assert make_plan(**only("s", "m", "l")) is None
    assert make_plan(**only("auto", "spare")) is None
    assert make_plan(model="default", **only("auto", "s")).name == "s"


def test_bounds_hold_for_what_is_chosen_and_what_stands_behind_it():
    assert names(make_plan(regions={"us"}), ReplicaUnavailable()) == ["m", "l"]
    assert names(make_plan(local_only=True), ReplicaUnavailable()) == ["s", "spare", "m"]
    assert make_plan(FROM_LARGE, local_only=True).first_target().name == "m", (
        "a smaller model rather than one that is not local"
    )
    with pytest.raises(Forbidden, match="m is in us"):
        make_plan(TierPreference(("m", "big"), (), "medium"), regions={"asia"}).first_target()


@given(
    st.sampled_from([0, 1, 2]),
    st.sets(st.sampled_from(["auto", "s", "m", "l", "spare"])),
    st.booleans(),
    st.none() | st.sets(st.sampled_from(["eu", "us"])),
)
def test_no_choice_leads_where_its_caller_may_not_go(place, allowed, local_only, regions):
    order = ("s", "m", "big")
    preference = TierPreference(order[place:], order[:place][::-1], "score")
    plan = make_plan(preference, local_only=local_only, regions=regions, **only(*allowed))
    assert (plan is None) == ("auto" not in allowed or not allowed & {"s", "m", "l"})
    if plan is None:
        return
    try:
        reached = names(plan, ReplicaUnavailable())
    except Forbidden:
        reached = []
    assert len(set(reached)) == len(reached)
    for name in reached:
        pool = CONFIG.pools[name]
        assert name in allowed
        assert pool.local or not local_only
        assert regions is None or pool.region in regions


def test_a_sound_choice_has_no_faults_and_is_listed():
    assert list(route_faults(CONFIG)) == []
    assert RoutingTable(CONFIG).names.listed_names == ["s", "m", "l", "spare", "auto", "big", "default"]
    assert AutoModel(AUTO).model_names == ["s", "m", "big", "code/x"]


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        ({"auto": {"a": AutoConfig(small="spar", medium="m", large="l")}}, "auto.a.small", "Did you mean spare?"),
        ({"auto": {"a": AutoConfig(small="s", medium="a", large="l")}}, "auto.a.medium", "Name one of its models"),
        (
            {"auto": {"a": AutoConfig(small="s", medium="m", large="l", tasks={Task.CHAT: "gone"})}},
            "auto.a.tasks.chat",
            "No such model: 'gone'",
        ),
        *(
            (
                {"auto": {"a": AutoConfig(small="s", medium="m", large="l", thresholds=thresholds)}},
                "auto.a.thresholds",
                f"the lower one first, not [{shown}]",
            )
            for thresholds, shown in (
                ([0.7, 0.3], "0.7, 0.3"),
                ([0.5], "0.5"),
                ([0.1, 2.0], "0.1, 2"),
                ([float("nan"), 1.0], "nan, 1"),
            )
        ),
        ({"auto": {"s": AUTO}}, "auto.s", "a name of its own"),
        ({"auto": {"a*": AUTO}}, "auto.a*", "Has a `*`"),
        ({"fallbacks": {"auto": FallbackConfig()}, "auto": {"auto": AUTO}}, "fallbacks.auto", "routing.auto.auto"),
        (
            {"fallbacks": {"s": FallbackConfig(general=["auto"])}, "auto": {"auto": AUTO}},
            "fallbacks.s.general[0]",
            "Name one of its models",
        ),
    ],
)
def test_a_fault_is_named_with_its_remedy(change, key, message):
    table = {name: getattr(CONFIG, name) for name in RoutesConfig.__struct_fields__}
    faults = dict(route_faults(RoutesConfig(**table | {"aliases": {"big": "l"}} | change)))
    assert message in faults[f"routing.{key}"]


SIZES = {"models_by_size": ("s", "m", "big")}
SMALL = TierPreference(("s", "m", "big"), (), "small", 0.1, **SIZES)
CODE = TierPreference(("code/x", "s", "m", "big"), (), "code", 0.1, **SIZES)


def upward(preference, *failures, **needs):
    """The models after that which answers once these failures have led to it, and what follows when they fail, too."""
    routes, needed = RoutingTable(CONFIG), RequestRequirements("auto", **needs)
    before = routes.route_by_preference(needed, preference)
    before.first_target()
    for failure in failures:
        before.next_target(failure)
    after = routes.route_to_larger(needed, preference, before)
    return None if after is None else names(after, ReplicaUnavailable())


def test_what_is_larger_than_who_has_answered():
    assert upward(SMALL) == ["m", "l"]
    assert upward(SMALL, ReplicaUnavailable()) == ["m", "l"], "the spare one is none of the sizes"
    assert upward(SMALL, ContextLengthExceeded()) == ["l"], "m has answered"
    assert upward(SMALL, *2 * [ContextLengthExceeded()]) is None
    assert upward(TierPreference(("big",), ("m", "s"), "large", 0.9, **SIZES)) is None
    assert upward(CODE) == ["s", "spare", "m", "l"], "a task's model is followed as when it fails"


def test_nothing_larger_passes_the_bounds_or_is_closed():
    assert upward(SMALL, local_only=True) == ["m"]
    assert upward(SMALL, regions={"eu"}) is None
    assert upward(SMALL, **only("auto", "s", "big")) == ["l"]
    assert upward(SMALL, **only("auto", "s")) is None


@given(
    st.permutations(["s", "m", "l", "spare"]).map(lambda order: order[:3]),
    st.lists(st.sampled_from([ReplicaUnavailable(), ContextLengthExceeded()]), max_size=4),
    st.booleans(),
    st.none() | st.sets(st.sampled_from(["eu", "us"])),
)
def test_going_upward_ends_and_visits_no_place_twice(sizes, failures, local_only, regions):
    routes, needs = RoutingTable(CONFIG), RequestRequirements("auto", local_only=local_only, regions=regions)
    preference = TierPreference(tuple(sizes), (), "small", 0.1, tuple(sizes))
    plan = routes.route_by_preference(needs, preference)
    visited = []
    while plan is not None:
        try:
            target = plan.first_target()
        except Forbidden:
            break
        for failure in [*failures, None]:
            visited.append((target.pool, target.model))
            pool = CONFIG.pools[target.pool]
            assert pool.local or not local_only
            assert regions is None or pool.region in regions
            if failure is None or (target := plan.next_target(failure)) is None:
                break
        plan = routes.route_to_larger(needs, preference, plan)
    assert len(visited) == len({*visited}), "no place twice"
