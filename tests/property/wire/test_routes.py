"""Whatever the table and the request: nothing is on the list that it may not be on, and nothing is missing."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.core.errors import (
    ContentRefused,
    ContextLengthExceeded,
    Forbidden,
    InvalidRequest,
    QueueFull,
    ReplicaLost,
    Unsupported,
)
from maitred.routing.pools.config import FallbackConfig, PoolConfig, RoutesConfig, TargetConfig
from maitred.routing.pools.faults import route_faults
from maitred.routing.pools.names import NameResolver
from maitred.routing.pools.requirements import ExclusionReason, RequestRequirements, find_exclusion
from maitred.routing.pools.route_table import RoutingTable, TargetReason

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
                capabilities=st.none() | st.lists(CAPABILITIES, unique=True),
                local=st.booleans(),
                region=st.none() | REGIONS,
            )
            for name in "pqr"
        }
    ),
    names=st.dictionaries(
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
    RequestRequirements,
    model=st.sampled_from(["a", "b", "c", "d", "e", "x/a", "x/z", "zb", "z"]),
    capabilities=st.sets(CAPABILITIES),
    local_only=st.booleans(),
    regions=st.none() | st.sets(REGIONS),
    allowed=st.sampled_from([lambda name: True, lambda name: name != "b", {"a", "x/*"}.__contains__]),
)


FAILURES = st.lists(
    st.sampled_from([ReplicaLost(), QueueFull(), ContextLengthExceeded(), ContentRefused(), Unsupported("No.")]),
    min_size=12,
    max_size=12,
)


@given(TABLES, NEEDS, FAILURES)
def test_nobody_is_sent_where_it_may_not_go_nor_twice_to_one_place(config, needs, failures):
    plan = RoutingTable(config).make_plan(needs)
    if plan is None:
        found = NameResolver(config).resolve(needs.model)
        assert found is None or not any(map(needs.allowed, (needs.model, found.name, found.key)))
        return
    visited = []
    try:
        target = plan.first_target()
    except (InvalidRequest, Forbidden) as raised:
        refusal = raised
    else:
        refusal = None
    if refusal is not None:
        assert all(exclusion.explanation in refusal.message for exclusion in plan.excluded)
        private = {exclusion.reason for exclusion in plan.excluded} <= {ExclusionReason.PRIVACY, ExclusionReason.REGION}
        assert isinstance(refusal, Forbidden) == private
        return
    for failure in failures:
        visited.append(target)
        pool = config.pools[target.pool]
        assert find_exclusion(pool, needs) is None
        assert pool.local or not needs.local_only
        assert needs.regions is None or pool.region in needs.regions
        assert target.name in config.names
        if (target := plan.next_target(failure)) is None:
            break
    places = [(target.pool, target.model) for target in visited]
    assert len(places) == len(set(places))
    ranks = [target.reason for target in visited]
    assert ranks == sorted(ranks, key=lambda rank: rank is not TargetReason.OWN), "own ones first"


@given(TABLES, st.sampled_from(["a", "b", "c", "x/a", "x/z", "zb", "z"]))
def test_the_name_that_fits_best_counts(config, name):
    names = NameResolver(config)
    found = names.resolve(name)
    followed = [name]
    while followed[-1] in config.aliases and followed[-1] not in followed[:-1]:
        followed.append(config.aliases[followed[-1]])
    name = followed[-1]
    if name in config.aliases:
        assert found is None, "a cycle of aliases"
        return
    assert names.canonical(followed[0]) == name
    fitting = [
        pattern
        for pattern in config.names
        if "*" in pattern
        and len(name) >= len(pattern) - 1
        and name.startswith(pattern.partition("*")[0])
        and name.endswith(pattern.partition("*")[2])
    ]
    if name in config.names:
        expected = config.names[name]
    elif fitting:
        expected = config.names[max(fitting, key=len)] if len({*map(len, fitting)}) == len(fitting) else None
    else:
        assert found is None
        return
    assert found is not None
    if expected is not None:
        assert [pool for pool, _ in found.targets] == [target.pool for target in expected]


@given(TABLES)
def test_a_table_without_faults_has_no_dead_ends(config):
    if list(route_faults(config)):
        return
    routes = RoutingTable(config)
    for name in [*config.aliases, *config.fallbacks]:
        if "*" not in name:
            assert routes.make_plan(RequestRequirements(name)) is not None
