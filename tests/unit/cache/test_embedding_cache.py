"""The cache of vectors: what it finds, and what it does not."""

import pytest

from maitred.cache.answer_cache import AnswerCache
from maitred.cache.answer_key import AnswerKey
from maitred.cache.backend import MemoryBackend
from maitred.cache.config import CacheConfig
from maitred.cache.embedding_cache import EmbeddingCache, text_digests
from tests.support.admission_services import StillClock

TEXTS = [[1], [2], [1, 2], [12], [1, 2, 3], [258], [1, 0]]


def make_cache(**config):
    clock = StillClock()
    backend = MemoryBackend(1 << 20, clock)
    return EmbeddingCache(AnswerCache(CacheConfig(**config), backend, clock), backend), backend, clock


def make_keys(count, organisation="acme"):
    return [
        AnswerKey(digest, "team", organisation, "m")
        for digest in text_digests([[number] for number in range(count)], [organisation])
    ]


def test_every_text_and_every_part_has_its_own_digest():
    digests = [*text_digests(TEXTS, ["a", "bc"]), *text_digests(TEXTS, ["ab", "c"]), *text_digests(TEXTS, ["abc"])]
    assert len(set(digests)) == 3 * len(TEXTS)


async def test_vectors_are_found_with_their_age_in_the_order_of_the_keys():
    cache, _, clock = make_cache()
    keys = make_keys(300)
    cache.store([(key, bytes([number % 256]) * 8) for number, key in enumerate(keys) if number % 3], 60)
    clock.now_s += 7
    found = await cache.find(keys)
    assert found == [(bytes([number % 256]) * 8, 7) if number % 3 else None for number in range(300)]
    assert await cache.find(keys, max_age_s=6) == [None] * 300
    assert await cache.find([]) == []


async def test_vectors_leave_at_their_time():
    cache, _, clock = make_cache()
    (key,) = make_keys(1)
    cache.store([(key, b"12345678")], 60)
    clock.now_s += 61
    assert await cache.find([key]) == [None]


@pytest.mark.parametrize(
    "harm", [lambda data: data[:-1], lambda data: data[:9], lambda data: b"", lambda data: b"a" + data]
)
async def test_an_entry_that_was_harmed_is_not_found(harm):
    cache, backend, _ = make_cache()
    key, other = make_keys(2)
    cache.store([(key, b"12345678"), (other, b"abcdefgh")], 60)
    (data,) = await backend.get_many([key])
    backend.put_many([(key, harm(data))], 60)
    assert await cache.find([key, other]) == [None, (b"abcdefgh", 0)]


async def test_an_entry_under_another_key_is_not_found():
    cache, backend, _ = make_cache()
    key, other = make_keys(2)
    cache.store([(key, b"12345678")], 60)
    backend.put_many([(other, (await backend.get_many([key]))[0])], 60)
    assert await cache.find([other]) == [None]


async def test_the_organisation_with_most_loses_vectors():
    cache, _, _ = make_cache()
    (small,), large = make_keys(1, "small"), make_keys(2000, "large")
    cache.store([(small, bytes(400))], 60)
    for key in large:
        cache.store([(key, bytes(400))], 60)
    assert (await cache.find([small]))[0] is not None
    assert sum(entry is None for entry in await cache.find(large)) > 0
