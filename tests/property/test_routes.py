"""Whatever the table and the request: nothing is on the list that it may not be on, and nothing is missing."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.routing.pools.config import FallbackConfig, PoolConfig, RoutesConfig, TargetConfig
from maitred.routing.pools.faults import route_faults
from maitred.routing.pools.names import Names
from maitred.routing.pools.needs import Needs, cost_usd, objection
from maitred.routing.pools.routes import Rank, Routes

NAMES = st.sampled_from(["a", "b", "x/a", "x/b", "x/*", "*", "*b", "c"])
POOLS = st.sampled_from(["p", "q", "r"])
CAPABILITIES = st.sampled_from(["tools", "vision"])
REGIONS = st.sampled_from(["eu", "us"])
NO_DOUBLES = {"max_size": 3, "unique": True}

TABLES = st.builds(
    RoutesConfig,
    pools=st.fixed_dictionaries(
        {
            name: st.builds(
                PoolConfig,
                context_tokens=st.none() | st.integers(1, 100),
                capabilities=st.none() | st.lists(CAPABILITIES, unique=True),
                local=st.booleans(),
                region=st.none() | REGIONS,
                prompt_usd_per_million=st.floats(0, 10),
            )
            for name in "pqr"
        }
    ),
    models=st.dictionaries(
        NAMES, st.lists(st.builds(TargetConfig, pool=POOLS, model=st.none() | st.just("m")), min_size=1, max_size=3)
    ),
    aliases=st.dictionaries(st.sampled_from("cdef"), st.sampled_from(["a", "x/b", "c", "d", "e"])),
    fallbacks=st.dictionaries(
        NAMES,
        st.builds(
            FallbackConfig,
            general=st.lists(NAMES, **NO_DOUBLES),
            context_length=st.lists(NAMES, **NO_DOUBLES),
            content_policy=st.lists(NAMES, **NO_DOUBLES),
        ),
    ),
)
NEEDS = st.builds(
    Needs,
    model=st.sampled_from(["a", "b", "c", "d", "e", "x/a", "x/z", "zb", "z"]),
    prompt_tokens=st.integers(0, 100),
    output_tokens=st.integers(0, 20),
    capabilities=st.sets(CAPABILITIES),
    local_only=st.booleans(),
    regions=st.none() | st.sets(REGIONS),
    most_usd=st.none() | st.floats(0, 1e-3),
)


@given(TABLES, NEEDS, st.sets(POOLS))
def test_every_place_is_listed_or_has_its_reason(config, needs, away):
    routes = Routes(config, lambda pool: pool not in away)
    for route in (routes.find(needs), routes.after_refusal(needs)):
        if route is None:
            assert Names(config).find(needs.model) is None
            continue
        placed = [(each.pool, each.model) for each in [*route.targets, *route.left_out]]
        assert len(placed) == len(set(placed))
        for target in route.targets:
            pool = config.pools[target.pool]
            assert objection(pool, needs) is None
            assert target.pool not in away
            assert pool.local or not needs.local_only
            assert needs.regions is None or pool.region in needs.regions
            assert needs.most_usd is None or cost_usd(pool, needs) <= needs.most_usd
        for each in route.left_out:
            assert each.pool in away or objection(config.pools[each.pool], needs) == (each.ground, each.why)
        ranks = [target.rank for target in route.targets]
        assert ranks == sorted(ranks, key=[Rank.OWN, *[r for r in Rank if r is not Rank.OWN]].index)
        if not route.targets and route.left_out:
            assert all(each.why in route.refusal().message for each in route.left_out)


@given(TABLES, st.sampled_from(["a", "b", "c", "x/a", "x/z", "zb", "z"]))
def test_the_name_that_fits_best_counts(config, name):
    names = Names(config)
    found = names.find(name)
    name = names.canonical(name)
    fitting = [
        pattern
        for pattern in config.models
        if "*" in pattern
        and len(name) >= len(pattern) - 1
        and name.startswith(pattern.partition("*")[0])
        and name.endswith(pattern.partition("*")[2])
    ]
    if name in config.models:
        expected = config.models[name]
    elif fitting:
        expected = config.models[max(fitting, key=len)] if len({*map(len, fitting)}) == len(fitting) else None
    else:
        assert found is None
        return
    assert found is not None
    if expected is not None:
        assert [pool for pool, _ in found.targets] == [each.pool for each in expected]


@given(TABLES)
def test_a_table_without_faults_has_no_dead_ends(config):
    if list(route_faults(config)):
        return
    routes = Routes(config)
    for name in [*config.aliases, *config.fallbacks]:
        if "*" not in name:
            assert routes.find(Needs(name)) is not None
