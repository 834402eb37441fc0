"""Where replicas start, and the facts of several agents as one."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from maitred.fleet.agent.placement import AgentLoad, merge_facts, place
from maitred.fleet.backend import BackendFacts
from maitred.scaling.startup_times import StartKind


def load(name, most=4, **fields):
    return AgentLoad(name=name, facts=BackendFacts(max_replicas=most, max_starts=2), **fields)


def test_the_emptiest_agent_gets_the_next_replica():
    assert place([load("a", replicas=2), load("b", replicas=1), load("c", replicas=1, most=5)]).name == "c"


def test_replicas_are_spread_over_zones_before_machines_are_filled():
    agents = [load("a", zone="x", replicas=1), load("b", zone="x", most=9), load("c", zone="y", most=1)]
    assert place(agents).name == "c"


def test_an_agent_whose_starts_fail_comes_last_and_one_that_starts_enough_before_it():
    failing, busy = load("a", most=9, is_failing=True, replicas=1), load("b", replicas=2, starting=2)
    assert place([failing, busy]).name == "b"
    assert place([failing, load("b", most=2, replicas=2)]).name == "a"


def test_what_is_away_or_full_gets_nothing():
    assert place([load("a", is_connected=False), load("b", most=1, replicas=1)]) is None
    assert place([]) is None


def test_places_are_added_up_and_what_is_away_adds_only_what_it_has():
    away = load("a", is_connected=False, replicas=2)
    facts = merge_facts([away, load("b", replicas=1, starting=1), load("c", replicas=9)])
    assert (facts.max_replicas, facts.max_starts) == (2 + 4 + 9, 2)
    assert facts.outlives_gateway
    assert merge_facts([]).max_replicas == 0
    assert merge_facts([away]).max_replicas == 2


def test_all_must_be_able_to_sleep_and_a_start_takes_what_it_does_there():
    sleeps = BackendFacts(max_replicas=1, can_sleep=True, start_kind=StartKind.WEIGHTS_CACHED, usd_per_hour=2.0)
    one, other = AgentLoad(name="a", facts=sleeps), AgentLoad(name="b", facts=replace(sleeps, expected_start_s=60.0))
    assert merge_facts([one, other]).can_sleep
    assert merge_facts([one, other]).expected_start_s == 10.0
    assert merge_facts([replace(one, replicas=1), other]).expected_start_s == 60.0
    assert merge_facts([one, other]).start_kind is StartKind.WEIGHTS_CACHED
    assert merge_facts([one, load("c")]).usd_per_hour == 2.0
    assert not merge_facts([one, load("c")]).can_sleep


agents_of = st.lists(
    st.builds(
        AgentLoad,
        name=st.uuids().map(str),
        facts=st.builds(BackendFacts, max_replicas=st.integers(0, 4), max_starts=st.integers(1, 3)),
        zone=st.sampled_from(["", "x", "y"]),
        is_connected=st.booleans(),
        replicas=st.integers(0, 5),
        starting=st.integers(0, 2),
        is_failing=st.booleans(),
    ),
    max_size=6,
)


@given(agents_of, st.randoms(use_true_random=False))
def test_every_free_place_is_filled_once_whatever_the_order(agents, random):
    """A pool orders as many starts as the facts allow, and each of them finds its place."""
    there = sum(agent.replicas for agent in agents)
    ordered = 0
    while there < merge_facts(agents).max_replicas:
        random.shuffle(agents)
        chosen = place(agents)
        assert chosen is not None
        assert chosen.is_connected
        assert chosen.replicas < chosen.facts.max_replicas
        agents[agents.index(chosen)] = replace(chosen, replicas=chosen.replicas + 1, starting=chosen.starting + 1)
        there, ordered = there + 1, ordered + 1
        assert ordered <= 30
    assert place(agents) is None
