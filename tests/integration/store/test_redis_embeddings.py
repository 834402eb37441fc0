"""Vectors in Redis: gateways share them, many at once, and whatever happens to Redis, they are computed."""

from uuid import uuid4

import pytest
import redis

from maitred.cache.answer_cache import AnswerCache, open_backend
from maitred.cache.answer_key import AnswerKey
from maitred.cache.backend import AnswerSelection, CachedAnswers
from maitred.cache.config import CacheConfig
from maitred.cache.embedding_cache import EmbeddingCache, text_digests
from maitred.cache.redis_backend import PAUSE_S
from tests.support.clock import FakeClock
from tests.support.servers.redis_server import redis_server

KEYS = [AnswerKey(digest, "team", "acme", "m") for digest in text_digests([[number] for number in range(2048)], ["s"])]
VECTORS = [number.to_bytes(4) * 384 for number in range(2048)]
PATIENCE_S = 10.0


@pytest.fixture
def server():
    with redis_server() as server:
        yield server


def config_of(server, timeout_s=PATIENCE_S):
    return CacheConfig(url=server.url, namespace=uuid4().hex, answer_timeout_s=timeout_s)


def cache_on(backend, config, clock):
    return EmbeddingCache(AnswerCache(config, backend, clock), backend)


async def test_many_vectors_are_shared_in_their_order(server):
    config, clock = config_of(server), FakeClock()
    async with open_backend(config, clock) as one, open_backend(config, clock) as other:
        writer, reader = cache_on(one, config, clock), cache_on(other, config, clock)
        await writer.store([*zip(KEYS, VECTORS, strict=True)][::2], 60)
        clock.now_s += 5
        assert await reader.find(KEYS) == [
            None if number % 2 else (vector, 5.0) for number, vector in enumerate(VECTORS)
        ]
        assert await one.describe() == [CachedAnswers("team", "m", "", 1024, 1024 * (2 + 16 + 8 + 4 * 384))]
        clock.now_s += 56
        assert set(await reader.find(KEYS)) == {None}, "their time is over"
        assert await one.remove(AnswerSelection(tenant="team")) == 1024


async def test_harmed_entries_are_not_found(server):
    config, clock = config_of(server), FakeClock()
    async with open_backend(config, clock) as backend:
        cache = cache_on(backend, config, clock)
        await cache.store([*zip(KEYS[:4], VECTORS, strict=False)], 60)
        client = redis.Redis(unix_socket_path=server.url.reveal().removeprefix("unix://"))
        names = [f"{config.namespace}:answer:{key.name}" for key in KEYS[:4]]
        client.set(names[0], client.get(names[0])[:-1])
        client.set(names[1], b"poison")
        client.set(names[2], client.get(names[3]))
        assert await cache.find(KEYS[:4]) == [None, None, None, (VECTORS[3], 0.0)]


async def test_a_redis_that_dies_and_comes_back_empty_is_a_miss(server):
    config, clock = config_of(server, timeout_s=0.2), FakeClock()
    async with open_backend(config, clock) as backend:
        cache = cache_on(backend, config, clock)
        await cache.store([*zip(KEYS, VECTORS, strict=True)], 60)
        server.kill()
        assert set(await cache.find(KEYS)) == {None}
        await cache.store([(KEYS[0], VECTORS[0])], 60)
        server.start()
        clock.now_s += PAUSE_S
        assert set(await cache.find(KEYS)) == {None}
