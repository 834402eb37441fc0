import pytest

from maitred.core.errors import (
    ContentRefused,
    ContextLengthExceeded,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    QueueFull,
    QuotaExceeded,
    ReplicaBusy,
    ReplicaLost,
    ReplicaUnavailable,
    TooExpensive,
    Unsupported,
)
from maitred.routing.pools.config import FallbackConfig, PoolConfig, RoutesConfig, TargetConfig
from maitred.routing.pools.faults import route_faults
from maitred.routing.pools.requirements import RequestRequirements
from maitred.routing.pools.route_table import RoutingTable, TargetReason

CONFIG = RoutesConfig(
    pools={
        "small": PoolConfig(capabilities=["tools"], region="eu"),
        "long": PoolConfig(region="eu"),
        "cloud": PoolConfig(local=False, region="us"),
    },
    names={
        "tiny": [TargetConfig(pool="small"), TargetConfig(pool="cloud", model="gpt-4o-mini")],
        "big": [TargetConfig(pool="long", model="big-128k")],
        "openai/*": [TargetConfig(pool="cloud", model="*")],
        "openai/*-local": [TargetConfig(pool="small", model="*")],
        "*": [TargetConfig(pool="cloud")],
    },
    aliases={"gpt-4o": "tiny", "default": "gpt-4o"},
    fallbacks={
        "tiny": FallbackConfig(general=["openai/gpt-4o", "big"], context_length=["big"], content_policy=["openai/o1"])
    },
)


def make_plan(model="tiny", **needs):
    return RoutingTable(CONFIG).make_plan(RequestRequirements(model, **needs))


def places(plan, failure):
    """Where a request goes that everybody fails alike."""
    target = plan.first_target()
    found = [(target.pool, target.model, target.reason)]
    while (target := plan.next_target(failure)) is not None:
        found.append((target.pool, target.model, target.reason))
    return found


OWN = [("small", None, TargetReason.OWN), ("cloud", "gpt-4o-mini", TargetReason.OWN)]


@pytest.mark.parametrize("failure", [ReplicaUnavailable(), ReplicaBusy(), ReplicaLost(), QueueFull(), TooExpensive()])
def test_own_targets_come_first_then_the_general_chain_each_place_once(failure):
    assert places(make_plan(), failure) == [
        *OWN,
        ("cloud", "gpt-4o", TargetReason.GENERAL),
        ("long", "big-128k", TargetReason.GENERAL),
    ]


def test_what_is_too_long_for_all_goes_to_the_longer_window():
    assert places(make_plan(), ContextLengthExceeded()) == [*OWN, ("long", "big-128k", TargetReason.CONTEXT_LENGTH)]


def test_what_one_provider_refuses_is_not_shown_to_the_next_place_of_the_same_model():
    assert places(make_plan(), ContentRefused()) == [OWN[0], ("cloud", "o1", TargetReason.CONTENT_POLICY)]


@pytest.mark.parametrize("failure", [InvalidRequest("No."), DeadlineExceeded()])
def test_what_is_nobodys_fault_here_goes_nowhere_else(failure):
    assert places(make_plan(), failure) == OWN[:1]


def test_limits_are_not_gone_round():
    failure = QuotaExceeded("Used up.", subject="tenant:a", limit="usd_per_day", value=1, reading=None)
    assert places(make_plan(), failure) == OWN[:1]


def test_one_chain_can_follow_another():
    plan = make_plan()
    plan.first_target()
    assert plan.next_target(ReplicaLost()).model == "gpt-4o-mini"
    assert plan.next_target(ContextLengthExceeded()).reason is TargetReason.CONTEXT_LENGTH
    assert plan.next_target(ReplicaLost()).reason is TargetReason.GENERAL
    assert plan.next_target(ReplicaLost()) is None, "big has been tried already"


def test_aliases_lead_on_and_bring_the_chain():
    assert places(make_plan("default"), ReplicaLost()) == places(make_plan(), ReplicaLost())
    assert make_plan("default").first_target().name == "tiny"


@pytest.mark.parametrize(
    ("name", "pool", "model", "key"),
    [
        ("openai/o3", "cloud", "o3", "openai/*"),
        ("openai/phi-local", "small", "phi", "openai/*-local"),
        ("openai/", "cloud", "", "openai/*"),
        ("anything", "cloud", None, "*"),
        ("big", "long", "big-128k", "big"),
    ],
)
def test_the_name_as_it_stands_then_the_longest_pattern(name, pool, model, key):
    target = make_plan(name).first_target()
    assert (target.pool, target.model, target.name) == (pool, model, key)


def test_a_name_that_leads_nowhere():
    assert RoutingTable(RoutesConfig()).make_plan(RequestRequirements("tiny")) is None
    assert RoutingTable(RoutesConfig(aliases={"a": "b", "b": "a"})).make_plan(RequestRequirements("a")) is None


def test_a_fallback_never_leaves_this_machine_or_the_region():
    assert {pool for pool, *_ in places(make_plan(local_only=True), ReplicaLost())} == {"small", "long"}
    assert {pool for pool, *_ in places(make_plan(regions={"us"}), ReplicaLost())} == {"cloud"}
    assert places(make_plan(local_only=True), ContentRefused()) == OWN[:1]


def test_a_fallback_never_reaches_a_model_that_is_not_allowed():
    open_ones = {"tiny", "big"}
    assert places(make_plan(allowed=open_ones.__contains__), ReplicaLost()) == [
        *OWN,
        ("long", "big-128k", TargetReason.GENERAL),
    ]
    assert make_plan(allowed={"big"}.__contains__) is None
    assert make_plan("default", allowed={"default"}.__contains__) is not None, "open under the name that was asked for"
    assert make_plan("openai/o3", allowed={"openai/*"}.__contains__) is not None


def test_what_no_own_target_can_do_goes_to_the_chain_at_once():
    assert make_plan("tiny", capabilities={"vision"}).first_target().pool == "cloud"
    config = RoutesConfig(
        pools={"a": PoolConfig(capabilities=[]), "b": PoolConfig()},
        names={"a": [TargetConfig(pool="a")], "b": [TargetConfig(pool="b")]},
        fallbacks={"a": FallbackConfig(general=["b"])},
    )
    assert (
        RoutingTable(config).make_plan(RequestRequirements("a", capabilities={"tools"})).first_target().reason
        is TargetReason.GENERAL
    )
    plan = RoutingTable(config).make_plan(RequestRequirements("a"))
    plan.first_target()
    assert plan.next_target(Unsupported("No tools.")).pool == "b"


@pytest.mark.parametrize(
    ("model", "needs", "error", "sentence"),
    [
        ("openai/o3", {"local_only": True}, Forbidden, "cloud is not local, and the request may not leave."),
        ("big", {"regions": {"us", "ca"}}, Forbidden, "long is in eu, and the request is for ca, us."),
        ("openai/x-local", {"capabilities": {"vision", "tools"}}, InvalidRequest, "small has no vision."),
    ],
)
def test_a_refusal_says_why_of_every_pool(model, needs, error, sentence):
    with pytest.raises(error) as refusal:
        make_plan(model, **needs).first_target()
    assert sentence in refusal.value.message


def test_a_sound_table_has_no_faults():
    assert list(route_faults(CONFIG)) == []
    assert RoutingTable(CONFIG).names.listed_names == ["tiny", "big", "gpt-4o", "default"]


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        ({"names": {"m": [TargetConfig(pool="smal")]}}, "names.m[0].pool", "Did you mean small?"),
        ({"names": {"m": []}}, "names.m", "Leads to no pool"),
        ({"names": {"a*b*": [TargetConfig(pool="small")]}}, "names.a*b*", "more than one"),
        ({"names": {"m": [TargetConfig(pool="small", model="*")]}}, "names.m[0].model", "none that it could"),
        ({"names": {"m": [TargetConfig(pool="small")] * 2}}, "names.m[1]", "before it already"),
        ({"aliases": {"tiny": "big"}}, "aliases.tiny", "Is a model, too"),
        ({"aliases": {"a": "b", "b": "a"}}, "aliases.a", "back to itself"),
        ({"aliases": {"x-*": "big"}}, "aliases.x-*", "one name"),
        ({"names": {"big": [TargetConfig(pool="long")]}, "aliases": {"a": "bigg"}}, "aliases.a", "mean big?"),
        ({"fallbacks": {"gpt-4o": FallbackConfig()}}, "fallbacks.gpt-4o", "model itself: tiny"),
        ({"fallbacks": {"tiny": FallbackConfig(general=["gpt-4o"])}}, "fallbacks.tiny.general[0]", "the model itself"),
        ({"fallbacks": {"tiny": FallbackConfig(general=["big"] * 2)}}, "fallbacks.tiny.general[1]", "before it"),
    ],
)
def test_a_fault_is_named_with_its_remedy(change, key, message):
    table = {name: getattr(CONFIG, name) for name in RoutesConfig.__struct_fields__}
    if "names" in change:
        table |= {"aliases": {}, "fallbacks": {}}
    faults = dict(route_faults(RoutesConfig(**table | change)))
    assert message in faults[f"routing.{key}"]


def test_an_unknown_fallback_is_named():
    config = RoutesConfig(
        pools={"small": PoolConfig()},
        names={"tiny": [TargetConfig(pool="small")]},
        fallbacks={"tiny": FallbackConfig(context_length=["tiney"]), "huge": FallbackConfig()},
    )
    assert dict(route_faults(config)) == {
        "routing.fallbacks.tiny.context_length[0]": "No such model: 'tiney'. Did you mean tiny?",
        "routing.fallbacks.huge": "No such model: 'huge'. There are: tiny.",
    }
