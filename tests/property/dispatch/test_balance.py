"""Whatever the policy and the loads: a choice is one of the candidates, and keeps the bound where anybody can."""

import random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.balance import PlacementRequest, ReplicaCandidate
from maitred.core.flow import ServiceWeights
from maitred.routing.balance.balancer import Balancer
from maitred.routing.balance.by_load import LoadScorer
from maitred.routing.balance.config import BalanceConfig, PolicyName

TOKENS = st.integers(0, 10_000).map(float)
WEIGHTS = ServiceWeights()


@st.composite
def candidates(draw):
    found = []
    for number in range(draw(st.integers(1, 6))):
        known = draw(st.booleans())
        found.append(
            ReplicaCandidate(
                f"replica-{number}",
                draw(st.sampled_from([0.1, 0.5, 1.0])),
                draw(st.integers(0, 20)),
                draw(TOKENS),
                draw(TOKENS),
                draw(st.integers(0, 500)),
                draw(st.floats(0, 9)) if known else None,
                draw(st.floats(0, 9)) if known else None,
            )
        )
    return found


INQUIRIES = st.builds(
    PlacementRequest,
    prompt_tokens=st.integers(1, 20_000),
    output_tokens=TOKENS,
    session=st.none() | st.sampled_from(["x", "y"]),
)


@given(
    policy=st.sampled_from(get_args(PolicyName)),
    bound=st.none() | st.floats(1.01, 3),
    inquiry=INQUIRIES,
    among=candidates(),
    seed=st.integers(0, 9),
)
def test_a_choice_is_one_of_the_candidates(policy, bound, inquiry, among, seed):
    chance = random.Random(seed)
    chosen = Balancer(BalanceConfig(policy=policy, bound=bound), WEIGHTS, chance.random).choose(inquiry, among)
    assert chosen in among


@given(
    policy=st.sampled_from(get_args(PolicyName)),
    factor=st.floats(1.01, 3),
    rounds=st.lists(st.tuples(INQUIRIES, candidates()), min_size=1, max_size=12),
    seed=st.integers(0, 9),
)
def test_nobody_is_above_the_bound_while_another_could_take_the_request(policy, factor, rounds, seed):
    chance = random.Random(seed)
    balance = Balancer(BalanceConfig(policy=policy, bound=factor), WEIGHTS, chance.random)
    loads, bound = LoadScorer(WEIGHTS), balance._bound
    for inquiry, among in rounds:
        bound.filter_candidates(inquiry, among)  # opens accounts
        total, weights = sum(map(bound.load, among)), sum(candidate.weight for candidate in among)
        added = {candidate: loads.added_load(inquiry, candidate) for candidate in among}
        after = {candidate: (bound.load(candidate) + added[candidate]) / candidate.weight for candidate in among}
        within = [
            candidate
            for candidate in among
            if loads.load(candidate) == 0 or after[candidate] <= factor * (total + added[candidate]) / weights
        ]
        chosen = balance.choose(inquiry, among)
        assert chosen in within or (not within and after[chosen] == min(after.values()))


@pytest.mark.parametrize("policy", get_args(PolicyName))
@given(seed=st.integers(0, 2**32), bound=st.sampled_from([1.2, 1.5, None]))
def test_equal_requests_end_up_evenly_spread(policy, seed, bound):
    """Nobody is forgotten: of equal replicas with equal requests each gets about the same, under every policy."""
    chance = random.Random(seed)
    balance = Balancer(BalanceConfig(policy=policy, bound=bound), WEIGHTS, chance.random)
    running = dict.fromkeys("abcd", 0)
    for _ in range(400):
        among = [ReplicaCandidate(name, requests=held, prompt_tokens=100.0 * held) for name, held in running.items()]
        running[balance.choose(PlacementRequest(100), among).name] += 1
    assert max(running.values()) - min(running.values()) <= 12
