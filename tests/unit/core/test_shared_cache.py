"""The cache whose bound several owners share."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.core.shared_cache import SharedCache


def test_the_largest_owner_loses_its_least_recently_used_entry():
    cache = SharedCache(10)
    cache.put("mine", 1, "small")
    for number in range(9):
        assert cache.put(number, number, "large") == []
    assert cache.get(0) == 0
    assert cache.put(9, 9, "large") == [1], "0 was used since"
    for number in range(10, 100):
        cache.put(number, number, "large")
    assert (cache.get("mine"), cache.size, len(cache)) == (1, 10, 10)
    assert cache.put("more", 2, "small", size=3) == [91, 92, 93]


def test_an_entry_counts_for_its_first_owner_only():
    cache = SharedCache(2)
    cache.put("a", 1, "one")
    assert cache.put("a", 2, "other") == []
    assert (cache.get("a"), cache.size) == (1, 1)
    assert (cache.pop("a"), cache.pop("a"), cache.get("a"), cache.size) == (1, None, None, 0)


def test_an_entry_larger_than_the_cache_is_dropped():
    cache = SharedCache(2)
    assert cache.put("a", 1, "one", size=3) == ["a"]
    assert ("a" in cache, cache.size) == (False, 0)


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("abc"), st.integers(0, 5), st.booleans())))
def test_its_sums_are_exact(steps):
    cache, owners = SharedCache(12), {}
    for key, owner, size, reads in steps:
        if reads:
            cache.get(key)
            continue
        if key not in cache:
            owners[key] = owner, size
        cache.put(key, key, owner, size)
        assert cache.size == sum(owners[entry][1] for entry in owners if entry in cache) <= 12
        assert len(cache) == sum(entry in cache for entry in owners)
