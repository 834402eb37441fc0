"""The order in which entries leave a cache, and how it is learnt."""

import random

import pytest

from maitred.cache.adaptive import AdaptiveCache
from maitred.cache.eviction import CacheEntry, EvictionQueues


def queues_of(part, keys):
    queues = EvictionQueues(part)
    for key in keys:
        queues.add(key, CacheEntry(1, 10.0))
    return queues


def evictions(queues, now_s=0.0):
    return [queues.evict(now_s)[0] for _ in range(len(queues))]


def test_with_all_in_the_small_queue_the_least_recently_used_leaves():
    queues = queues_of(1.0, "abcd")
    for key in "bab":
        queues.use(key, queues.find(key))
    assert evictions(queues) == ["c", "d", "a", "b"]
    assert queues.size == 0


def test_what_was_used_while_new_stays_longer():
    queues = queues_of(0.1, "abcd")
    for key in "aab":
        queues.use(key, queues.find(key))
    assert [queues.evict(0.0)[0] for _ in range(2)] == ["c", "d"]
    queues.use("a", queues.find("a"))
    queues.add("e", CacheEntry(1, 10.0))
    assert evictions(queues) == ["e", "b", "a"], "a was used in the main queue, too"


def test_use_keeps_nothing_that_has_expired():
    for now_s, first in ((9.0, "b"), (10.0, "a")):
        queues = queues_of(0.1, "a")
        queues.use("a", queues.find("a"))
        queues.add("b", CacheEntry(1, 10.0))
        assert queues.evict(now_s)[0] == first


def test_a_key_that_comes_back_soon_is_not_new():
    queues = queues_of(0.1, "abcd")
    assert queues.evict(0.0)[0] == "a"
    queues.add("a", CacheEntry(1, 10.0))
    assert evictions(queues) == ["b", "c", "d", "a"]
    queues = queues_of(0.1, range(4))
    for key in range(100):
        queues.add(key + 4, CacheEntry(1, 10.0))
        queues.evict(0.0)
    queues.add(0, CacheEntry(1, 10.0))
    assert not queues.find(0).promoted, "it left long ago"


def part_of(cache):
    return cache._shares["owner"].queues.part


def ask(cache, keys):
    hits = 0
    for key in keys:
        if cache.get(key) is None:
            cache.put(key, key, "owner")
        else:
            hits += 1
    return hits


def again_and_new(chance, since):
    """Every key once more, after `since` others, and then never; numbers at random, so that a part is sampled."""
    keys = [chance.getrandbits(60) for _ in range(20_000)]
    for number, key in enumerate(keys):
        yield key
        if number >= since:
            yield keys[number - since]


def skewed(chance):
    """Every second look-up is of one of 800 keys, the others never come back."""
    often = [chance.getrandbits(60) for _ in range(800)]
    for _ in range(40_000):
        yield chance.choice(often)
        yield chance.getrandbits(60)


@pytest.mark.parametrize("first", ["again", "skewed"])
def test_it_learns_what_stays_and_learns_anew(first):
    chance = random.Random(1)
    cache = AdaptiveCache(1000)
    parts = {}
    for kind in (first, "again", "skewed", "again"):
        ask(cache, again_and_new(chance, 400) if kind == "again" else skewed(chance))
        parts.setdefault(kind, set()).add(part_of(cache))
    assert parts == {"again": {1.0}, "skewed": {0.05}}


def test_it_gains_by_what_it_has_learnt():
    kept = ask(AdaptiveCache(1000), again_and_new(random.Random(2), 400))
    assert kept > 0.9 * 19_600, "the least recently used leaves, and every key is there when it comes once more"
    kept = ask(AdaptiveCache(1000), skewed(random.Random(2)))
    assert kept > 0.9 * 40_000, "keys that never come back drive out nobody"
