"""The cache whose bound several owners share, and whose entries leave in an order that is learnt."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from maitred.cache.adaptive import AdaptiveCache


def test_the_largest_owner_loses_its_least_recently_used_entry():
    cache = AdaptiveCache(10)
    cache.put("mine", 1, "small")
    for number in range(9):
        assert cache.put(number, number, "large") == []
    assert cache.get(0) == 0
    assert cache.put(9, 9, "large") == [1], "0 was used since"
    for number in range(10, 100):
        cache.put(number, number, "large")
    assert (cache.get("mine"), cache.size, len(cache)) == (1, 10, 10)
    assert cache.put("more", 2, "small", size=3) == [92, 93, 94]
    assert 0 in cache, "it was used while it was new"


def test_an_entry_counts_for_its_last_owner_only():
    cache = AdaptiveCache(2)
    cache.put("a", 1, "one", size=2)
    assert cache.put("a", 2, "other") == []
    assert (cache.get("a"), cache.size) == (2, 1)
    assert list(cache.values()) == [2]
    assert (cache.pop("a"), cache.pop("a"), cache.get("a"), cache.size) == (2, None, None, 0)


def test_an_entry_larger_than_the_cache_is_dropped():
    cache = AdaptiveCache(2)
    assert cache.put("a", 1, "one", size=3) == ["a"]
    assert ("a" in cache, cache.size) == (False, 0)


def test_an_entry_too_large_for_its_owner_drops_no_other():
    cache = AdaptiveCache(100)
    for number in range(50):
        cache.put(("mine", number), number, "mine")
        cache.put(("other", number), number, "other")
    assert cache.put("large", 0, "mine", size=60) == ["large"]
    assert (len(cache), cache.size) == (100, 100)
    assert cache.put("large", 0, "third", size=34) == ["large"]
    dropped = cache.put("large", 0, "third", size=33)
    assert sorted(Counter(owner for owner, _ in dropped).values()) == [16, 17]
    assert ("large" in cache, cache.size) == (True, 100)


def test_what_has_expired_is_gone():
    cache = AdaptiveCache(3)
    cache.put("short", 1, "owner", expires_s=10.0, now_s=0.0)
    cache.put("long", 2, "owner", expires_s=20.0, now_s=0.0)
    assert (cache.get("short", 9.9), cache.get("short", 10.0), cache.get("long", 10.0)) == (1, None, 2)
    assert ("short" in cache, cache.size) == (False, 1)


def test_use_does_not_keep_what_has_expired():
    cache = AdaptiveCache(3)
    cache.put("expired", 1, "owner", expires_s=10.0)
    cache.get("expired", 5.0)
    cache.put("used", 2, "owner")
    cache.get("used", 5.0)
    cache.put("new", 3, "owner")
    assert cache.put("newest", 4, "owner", now_s=11.0) == ["expired"]


def test_an_entry_without_a_size_outlives_those_of_its_owner():
    cache = AdaptiveCache(2)
    cache.put("a", 1, "owner")
    cache.put("b", 2, "owner")
    cache.most = 0
    assert cache.put("c", 3, "owner", size=0) == ["a", "b"]
    assert (cache.pop("c"), len(cache)) == (3, 0)


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("abc"), st.integers(0, 5), st.booleans())))
def test_its_sums_are_exact(steps):
    cache, owners = AdaptiveCache(12), {}
    for key, owner, size, reads in steps:
        if reads:
            cache.get(key)
            continue
        owners[key] = owner, size
        cache.put(key, key, owner, size)
        assert cache.size == sum(owners[entry][1] for entry in owners if entry in cache) <= 12
        assert len(cache) == sum(entry in cache for entry in owners)
