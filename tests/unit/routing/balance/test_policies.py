from collections import Counter

import pytest

from maitred.core.balance import PlacementRequest, ReplicaCandidate
from maitred.core.flow import ServiceWeights
from maitred.routing.balance.balancer import Balancer, session_replica
from maitred.routing.balance.bounded_load import LoadBound
from maitred.routing.balance.by_load import LoadScorer
from maitred.routing.balance.config import BalanceConfig
from maitred.routing.balance.round_robin import RoundRobin, WeightedRoundRobin

ASK = PlacementRequest(prompt_tokens=100, output_tokens=10)


def balancer(policy, *, bound=None, draws=(), **settings):
    chance = iter(draws)
    return Balancer(BalanceConfig(policy=policy, bound=bound, **settings), ServiceWeights(), lambda: next(chance))


def names(policy, candidates, times, inquiry=ASK):
    return "".join(policy.choose(inquiry, candidates).name for _ in range(times))


def test_round_robin_takes_turns_whoever_comes_and_goes():
    policy, (a, b, c) = RoundRobin(), map(ReplicaCandidate, "abc")
    assert names(policy, [a, b, c], 4) == "abca"
    assert names(policy, [a, c], 2) == "ca"
    assert names(policy, [a, b, c], 3) == "bca"


def test_weighted_is_exact_and_even():
    policy = WeightedRoundRobin()
    row = names(policy, [ReplicaCandidate("a", 3.0), ReplicaCandidate("b"), ReplicaCandidate("c")], 500)
    assert row[:5] == "abaca"
    assert Counter(row) == {"a": 300, "b": 100, "c": 100}


def test_memory_of_turns_is_bounded():
    for policy in (RoundRobin(), WeightedRoundRobin()):
        for number in range(1_000):
            policy.choose(ASK, [ReplicaCandidate(f"r{number}"), ReplicaCandidate(f"r{number + 1}")])
        assert len(getattr(policy, "_credit", None) or policy._order._last_chosen) < 100
    rule = bound()
    for number in range(1_000):
        rule.record_dispatch(ASK, ReplicaCandidate(f"r{number}"), [ReplicaCandidate(f"r{number}")])
    assert len(rule._service_given) < 100


def test_the_fewest_requests_by_weight():
    policy = balancer("least_requests")
    assert names(policy, [ReplicaCandidate("a", requests=3), ReplicaCandidate("b", requests=2)], 1) == "b"
    assert names(policy, [ReplicaCandidate("a", 0.1, requests=0), ReplicaCandidate("b", requests=2)], 1) == "b"
    assert names(policy, [ReplicaCandidate("a", 0.0), ReplicaCandidate("b", requests=99)], 1) == "b", (
        "a weight of 0 gets nothing"
    )


def test_the_fewest_tokens_however_many_requests():
    long = ReplicaCandidate("a", requests=1, prompt_tokens=50_000)
    assert names(balancer("least_tokens"), [long, ReplicaCandidate("b", requests=40, output_tokens=2_000)], 1) == "b"
    assert names(balancer("least_tokens"), [ReplicaCandidate("a"), ReplicaCandidate("b")], 4) == "abab"


def test_power_of_two_looks_at_two_different_ones():
    three = [
        ReplicaCandidate("a", prompt_tokens=1),
        ReplicaCandidate("b", prompt_tokens=2),
        ReplicaCandidate("c", prompt_tokens=3),
    ]
    draws = [0.9, 0.0, 0.9, 0.9, 0.4, 0.0]
    assert names(balancer("power_of_two", draws=draws), three, 3) == "abb"
    assert names(balancer("power_of_two"), three[:1], 1) == "a"


@pytest.mark.parametrize("price", [1.0, 4.0])
def test_a_prefix_counts_until_the_wait_costs_more(price):
    policy = balancer("predicted_ttft", recompute_price=price)
    elsewhere = ReplicaCandidate("b", wait_s=0.0, prefill_s=1.0)
    assert names(policy, [ReplicaCandidate("a", wait_s=0.8 * price, prefill_s=0.1), elsewhere], 1) == "a"
    assert names(policy, [ReplicaCandidate("a", wait_s=1.0 * price, prefill_s=0.1), elsewhere], 1) == "b"


def test_where_nobody_knows_seconds_tokens_are_counted():
    policy = balancer("predicted_ttft", recompute_price=4.0)
    holds = ReplicaCandidate("a", prompt_tokens=250, cached_tokens=64)
    assert names(policy, [holds, ReplicaCandidate("b")], 1) == "a"
    assert names(policy, [holds, ReplicaCandidate("b", wait_s=0.0, prefill_s=9.0)], 1) == "a"
    assert names(policy, [ReplicaCandidate("a", prompt_tokens=260, cached_tokens=64), ReplicaCandidate("b")], 1) == "b"


def test_equal_predictions_do_not_send_all_requests_to_one_replica():
    policy = balancer("predicted_ttft")
    pair = [ReplicaCandidate("a", wait_s=0.100, prefill_s=0.9), ReplicaCandidate("b", wait_s=0.103, prefill_s=0.9)]
    assert names(policy, pair, 4) == "abab"


def test_a_replica_that_comes_back_has_to_be_so_much_better():
    policy = balancer("predicted_ttft")
    back, other = (
        ReplicaCandidate("a", 0.1, wait_s=0.0, prefill_s=0.2),
        ReplicaCandidate("b", wait_s=1.0, prefill_s=0.2),
    )
    assert names(policy, [back, other], 1) == "b"


def bound(factor=1.2):
    return LoadBound(factor, LoadScorer(ServiceWeights()))


def test_who_has_fallen_behind_is_passed_over():
    full, free = ReplicaCandidate("a", prompt_tokens=1_000, cached_tokens=96), ReplicaCandidate("b", prompt_tokens=900)
    assert bound().filter_candidates(ASK, [full, free]) == [full, free]
    full = ReplicaCandidate("a", prompt_tokens=2_000, cached_tokens=96)
    assert bound().filter_candidates(ASK, [full, free]) == [free]
    assert names(balancer("predicted_ttft", bound=1.2), [full, free], 1) == "b"
    assert names(balancer("predicted_ttft", bound=None), [full, ReplicaCandidate("b", prompt_tokens=2_500)], 1) == "a"


def test_who_was_given_much_lately_is_passed_over_while_it_is_busy():
    rule, (a, b) = (
        bound(),
        (ReplicaCandidate("a", output_tokens=1, cached_tokens=90), ReplicaCandidate("b", output_tokens=1)),
    )
    for turn in range(200):
        chosen = rule.filter_candidates(ASK, [a, b])[0]
        rule.record_dispatch(ASK, chosen, [a, b])
        assert turn < 9 or rule.load(a) / (rule.load(a) + rule.load(b)) <= 0.61
    assert rule.load(a) > rule.load(b), "up to the bound it has its way"


def test_who_is_alone_stays_where_the_cache_is():
    rule, (a, b) = bound(), (ReplicaCandidate("a", cached_tokens=90), ReplicaCandidate("b", output_tokens=1))
    for _ in range(100):
        rule.record_dispatch(ASK, a, [a, b])
    assert a in rule.filter_candidates(ASK, [a, b])


def test_who_comes_back_or_is_new_is_not_flooded():
    rule, (a, b, c) = bound(), map(ReplicaCandidate, "abc")
    for turn in range(200):
        rule.record_dispatch(ASK, (a, b)[turn % 2], [a, b])
    a, b, c = (ReplicaCandidate(name, output_tokens=1) for name in "abc")
    assert rule.filter_candidates(ASK, [a, b, c]) == [a, b, c]
    for _ in range(200):
        rule.record_dispatch(ASK, b, [b])
    assert a in rule.filter_candidates(ASK, [a, b, c])


def test_where_nobody_is_within_it_goes_where_least_will_be():
    pair = [ReplicaCandidate("a", prompt_tokens=11), ReplicaCandidate("b", prompt_tokens=10)]
    assert bound().filter_candidates(PlacementRequest(5_000), pair) == [pair[1]]
    holds = [ReplicaCandidate("a", prompt_tokens=11, cached_tokens=4_000), ReplicaCandidate("b", prompt_tokens=10)]
    assert bound().filter_candidates(PlacementRequest(5_000), holds) == [holds[0]]


def test_a_session_stays_and_moves_only_when_it_must():
    replicas = [ReplicaCandidate(name) for name in "abcd"]
    homes = {f"s{number}": session_replica(f"s{number}", replicas).name for number in range(2_000)}
    assert all(420 < count < 580 for count in Counter(homes.values()).values())
    without = {session: session_replica(session, replicas[1:]).name for session in homes}
    moved = [session for session in homes if homes[session] != without[session]]
    assert all(homes[session] == "a" for session in moved)
    heavy = [ReplicaCandidate("a", 3.0), ReplicaCandidate("b", 1.0)]
    assert Counter(session_replica(session, heavy).name for session in homes)["a"] == pytest.approx(1_500, abs=80)


def test_a_session_goes_before_the_policy_and_after_the_bound():
    idle = [ReplicaCandidate(name) for name in "abcd"]
    asks = PlacementRequest(100, 10, session="acme/7")
    home = session_replica("acme/7", idle).name
    assert set(names(balancer("round_robin", bound=1.2), idle, 8, asks)) == {home}
    assert set(names(balancer("round_robin", affinity=False), idle, 8, asks)) == set("abcd")
    busy = [ReplicaCandidate(name, prompt_tokens=9_000 if name == home else 10) for name in "abcd"]
    assert home not in names(balancer("round_robin", bound=1.2), busy, 8, asks)


def test_with_no_replica_there_is_nothing_to_choose():
    with pytest.raises(ValueError, match="no replica"):
        balancer("round_robin").choose(ASK, [ReplicaCandidate("a", 0.0)])
