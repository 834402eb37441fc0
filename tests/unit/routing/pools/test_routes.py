import pytest

from maitred.core.errors import ContextLengthExceeded, Forbidden, InvalidRequest, ReplicaUnavailable
from maitred.routing.pools.config import FallbackConfig, PoolConfig, RoutesConfig, TargetConfig
from maitred.routing.pools.faults import route_faults
from maitred.routing.pools.needs import Needs
from maitred.routing.pools.routes import Rank, Routes

CONFIG = RoutesConfig(
    pools={
        "small": PoolConfig(context_tokens=4_000, capabilities=["tools"], region="eu"),
        "long": PoolConfig(context_tokens=100_000, region="eu"),
        "cloud": PoolConfig(local=False, region="us", prompt_usd_per_million=2.0, output_usd_per_million=10.0),
    },
    models={
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


def found(model="tiny", *, usable=lambda pool: True, **needs):
    return Routes(CONFIG, usable).find(Needs(model, **needs))


def places(route):
    return [(target.pool, target.model, target.rank) for target in route.targets]


def test_own_targets_come_first_then_the_chain_each_place_once():
    assert places(found()) == [
        ("small", "tiny", Rank.OWN),
        ("cloud", "gpt-4o-mini", Rank.OWN),
        ("cloud", "gpt-4o", Rank.GENERAL),
        ("long", "big-128k", Rank.GENERAL),
    ]


def test_aliases_lead_on_and_bring_the_chain():
    assert found("default") == found("tiny")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("openai/o3", ("cloud", "o3")),
        ("openai/phi-local", ("small", "phi")),
        ("openai/", ("cloud", "")),
        ("anything", ("cloud", "anything")),
        ("big", ("long", "big-128k")),
    ],
)
def test_the_name_as_it_stands_then_the_longest_pattern(name, place):
    assert places(found(name)) == [(*place, Rank.OWN)]


def test_a_name_that_leads_nowhere():
    assert Routes(RoutesConfig()).find(Needs("tiny")) is None
    assert Routes(RoutesConfig()).after_refusal(Needs("tiny")) is None
    assert Routes(RoutesConfig(aliases={"a": "b", "b": "a"})).find(Needs("a")) is None


def test_what_is_too_long_goes_to_the_longer_window_first():
    route = found(prompt_tokens=5_000, output_tokens=100, local_only=True)
    assert places(route) == [("long", "big-128k", Rank.CONTEXT_LENGTH)]
    assert [(each.pool, each.why) for each in route.left_out] == [
        ("small", "takes 4000 tokens, and the request has 5100"),
        ("cloud", "is not local, and the request may not leave"),
        ("cloud", "is not local, and the request may not leave"),
    ]


def test_a_fallback_is_no_way_out_of_the_house_or_the_region():
    assert {target.pool for target in found(local_only=True).targets} == {"small", "long"}
    assert {target.pool for target in found(regions={"us"}).targets} == {"cloud"}
    assert places(Routes(CONFIG).after_refusal(Needs("tiny"))) == [("cloud", "o1", Rank.CONTENT_POLICY)]
    assert not Routes(CONFIG).after_refusal(Needs("tiny", local_only=True)).targets


def test_a_ceiling_on_cost():
    ask = {"prompt_tokens": 1_000, "output_tokens": 100}
    assert "cloud" in {target.pool for target in found(most_usd=0.0031, **ask).targets}
    route = found(most_usd=0.0029, **ask)
    assert "cloud" not in {target.pool for target in route.targets}
    assert route.left_out[0].why == "may cost $0.003, and the request may cost $0.0029"


@pytest.mark.parametrize(
    ("model", "needs", "error", "sentence"),
    [
        ("openai/o3", {"local_only": True}, Forbidden, "cloud is not local, and the request may not leave."),
        ("big", {"regions": {"us", "ca"}}, Forbidden, "long is in eu, and the request is for ca, us."),
        ("big", {"prompt_tokens": 200_000}, ContextLengthExceeded, "long takes 100000 tokens"),
        ("openai/x-local", {"capabilities": {"vision", "tools"}}, InvalidRequest, "small has no vision."),
        ("openai/o3", {"prompt_tokens": 10**6, "most_usd": 1.0}, InvalidRequest, "may cost $2"),
    ],
)
def test_a_refusal_says_why_of_every_pool(model, needs, error, sentence):
    route = found(model, **needs)
    assert not route.targets
    refusal = route.refusal()
    assert type(refusal) is error
    assert sentence in refusal.message


def test_a_pool_without_a_replica_is_a_matter_of_time():
    route = found("big", usable=lambda pool: False)
    assert isinstance(route.refusal(), ReplicaUnavailable)
    assert "long has no replica that takes requests now" in route.refusal().message


def test_a_sound_table_has_no_faults():
    assert list(route_faults(CONFIG)) == []
    assert Routes(CONFIG).names.listed == ["tiny", "big", "gpt-4o", "default"]


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        ({"models": {"m": [TargetConfig(pool="smal")]}}, "models.m[0].pool", "Did you mean small?"),
        ({"models": {"m": []}}, "models.m", "Leads to no pool"),
        ({"models": {"a*b*": [TargetConfig(pool="small")]}}, "models.a*b*", "more than one"),
        ({"models": {"m": [TargetConfig(pool="small", model="*")]}}, "models.m[0].model", "none that it could"),
        ({"models": {"m": [TargetConfig(pool="small")] * 2}}, "models.m[1]", "before it already"),
        ({"aliases": {"tiny": "big"}}, "aliases.tiny", "Is a model, too"),
        ({"aliases": {"a": "b", "b": "a"}}, "aliases.a", "back to itself"),
        ({"aliases": {"x-*": "big"}}, "aliases.x-*", "one name"),
        ({"models": {"big": [TargetConfig(pool="long")]}, "aliases": {"a": "bigg"}}, "aliases.a", "mean big?"),
        ({"fallbacks": {"gpt-4o": FallbackConfig()}}, "fallbacks.gpt-4o", "model itself: tiny"),
        ({"fallbacks": {"tiny": FallbackConfig(general=["gpt-4o"])}}, "fallbacks.tiny.general[0]", "the model itself"),
        ({"fallbacks": {"tiny": FallbackConfig(general=["big"] * 2)}}, "fallbacks.tiny.general[1]", "before it"),
    ],
)
def test_a_fault_is_named_with_its_remedy(change, key, message):
    table = {name: getattr(CONFIG, name) for name in RoutesConfig.__struct_fields__}
    if "models" in change:
        table |= {"aliases": {}, "fallbacks": {}}
    faults = dict(route_faults(RoutesConfig(**table | change)))
    assert message in faults[f"routing.{key}"]


def test_an_unknown_fallback_is_named():
    config = RoutesConfig(
        pools={"small": PoolConfig()},
        models={"tiny": [TargetConfig(pool="small")]},
        fallbacks={"tiny": FallbackConfig(context_length=["tiney"]), "huge": FallbackConfig()},
    )
    assert dict(route_faults(config)) == {
        "routing.fallbacks.tiny.context_length[0]": "No such model: 'tiney'. Did you mean tiny?",
        "routing.fallbacks.huge": "No such model: 'huge'. There are: tiny.",
    }
