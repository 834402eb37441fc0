"""Which limits hold for whom."""

import pytest

from maitred.admission.policy.rules import LimitRule, each, rules_for, tightest
from maitred.core.limits import LimitKind
from tests.support.admission_services import ALICE, Limits, limit


def test_limits_hold_from_the_key_to_the_installation():
    own, any_key = limit("key:alice", "requests_per_minute", 1), limit("key:*", "requests_per_minute", 2)
    team, any_tenant = limit("tenant:team", "requests_per_minute", 3), limit("tenant:*", "requests_per_minute", 4)
    acme, everyone = limit("tenant:acme", "requests_per_minute", 5), limit("*", "requests_per_minute", 6)
    strangers = limit("key:bob", "requests_per_minute", 7), limit("tenant:other", "requests_per_minute", 8)
    book = Limits(everyone, any_tenant, *strangers, team, acme, own, any_key)
    assert rules_for(ALICE.subjects, book, "tiny") == [
        LimitRule("key:alice", own),
        LimitRule("key:alice", any_key),
        LimitRule("tenant:team", team),
        LimitRule("tenant:team", any_tenant),
        LimitRule("tenant:acme", acme),
        LimitRule("tenant:acme", any_tenant),
        LimitRule("*", everyone),
    ]


def test_a_limit_of_one_model_does_not_hold_for_others():
    book = Limits(limit("*", "requests_per_minute", 1, model="tiny"), limit("*", "requests_per_minute", 2))
    assert [rule.limit.value for rule in rules_for(["*"], book, "tiny")] == [1, 2]
    assert [rule.limit.value for rule in rules_for(["*"], book, "large")] == [2]


@pytest.mark.parametrize(
    ("subject", "sort"), [("key:a", "key:*"), ("tenant:a:b", "tenant:*"), ("key:*", "key:*"), ("*", "")]
)
def test_each_one_of_a_sort(subject, sort):
    assert each(subject) == sort


def test_the_tightest_is_the_smallest_and_of_several_the_first():
    values = [("tenant:acme", 5), ("key:alice", 3), ("*", 3)]
    rules = [LimitRule(subject, limit(subject, "output_tokens", value)) for subject, value in values]
    assert tightest(rules, LimitKind.OUTPUT_TOKENS) is rules[1]
    assert tightest(rules, LimitKind.CONTEXT_TOKENS) is None
