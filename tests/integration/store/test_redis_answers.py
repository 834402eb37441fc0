"""Answers in Redis: gateways share them, and whatever happens to Redis or in it, a look-up is a miss and no error."""

import asyncio
import logging
from collections import Counter
from contextlib import asynccontextmanager
from itertools import pairwise
from uuid import uuid4

import msgspec
import pytest
import redis

from maitred.cache.answer import CachedAnswer
from maitred.cache.answer_cache import AnswerCache, open_backend
from maitred.cache.answer_key import AnswerKey, answer_digest
from maitred.cache.backend import AnswerSelection, CachedAnswers, MemoryBackend
from maitred.cache.config import CacheConfig
from maitred.cache.redis_backend import FIRST_PAUSE_S, PAUSE_S, RedisBackend
from maitred.core.errors import ConfigInvalid, StoreUnavailable
from maitred.core.inference import TextDelta
from maitred.core.request import FinishReason, Usage
from maitred.core.secret import Secret
from tests.support.clock import FakeClock
from tests.support.servers.redis_server import redis_server

PATIENCE_S = 10.0
"""For an answer where one comes: the most that the setting takes. A crowded machine can need more than a moment."""
TIMEOUT_S = 0.2
"""Where none comes."""


@pytest.fixture(scope="module")
def shared_server():
    with redis_server() as server:
        yield server


@pytest.fixture
def server():
    """A server that a test may kill."""
    with redis_server() as server:
        yield server


def key(question="q", tenant="acme", model="chat", server="", epoch=""):
    digest = answer_digest([question, tenant, model, epoch])
    return AnswerKey(digest, tenant, "org", model, server, epoch)


def answer(text="Paris.", fingerprint=""):
    deltas = [TextDelta(0, text, finish=FinishReason.STOP)]
    return CachedAnswer(deltas, Usage(3, 2), [FinishReason.STOP], stored_s=1_000_000.0, fingerprint=fingerprint)


class Installation:
    """Gateways of one namespace on one Redis."""

    def __init__(self, server, timeout_s=PATIENCE_S):
        self.server, self.clock, self.namespace = server, FakeClock(), uuid4().hex
        self.config = CacheConfig(url=server.url, namespace=self.namespace, answer_timeout_s=timeout_s)
        self.client = redis.Redis(unix_socket_path=server.url.reveal().removeprefix("unix://"))

    @asynccontextmanager
    async def gateway(self):
        async with open_backend(self.config, self.clock) as backend:
            yield AnswerCache(self.config, backend, self.clock), backend

    def value_key(self, key):
        return f"{self.namespace}:answer:{key.name}"


async def put(cache, key, answer, ttl_s=60.0):
    if (stored := cache.store(key, answer, ttl_s)) is not None:
        await stored


async def until(condition):
    async with asyncio.timeout(300):
        while not await condition():  # noqa: ASYNC110 - what is waited for is another process
            await asyncio.sleep(0.01)


async def finds_again(gateways, cache, key):
    """Waits until an answer is found, each time after the pause."""

    async def found():
        gateways.clock.now_s += PAUSE_S
        return await cache.find(key) is not None

    await until(found)


async def test_what_one_gateway_stores_another_finds(shared_server):
    gateways = Installation(shared_server)
    async with gateways.gateway() as (one, _), gateways.gateway() as (other, _):
        assert await other.find(key()) is None
        await put(one, key(), answer("Lyon."))
        await put(other, key(), answer("Paris."))
        found, age_s = await one.find(key())
        assert (found, age_s) == (answer("Paris."), 0.0)
        assert await one.find(key("another question")) is None
    async with Installation(shared_server).gateway() as (stranger, _):
        assert await stranger.find(key()) is None, "of another namespace"


async def test_the_seal_of_a_key_is_not_in_redis(shared_server):
    gateways = Installation(shared_server)
    async with gateways.gateway() as (cache, _):
        await put(cache, key(), answer())
    kept = [(name, gateways.client.get(name)) for name in gateways.client.keys(f"{gateways.namespace}:*")]
    assert len(kept) == 1
    for text in kept[0]:
        assert key().seal not in text
        assert key().seal.hex().encode() not in text


async def test_an_answer_ends_with_its_time_in_redis_and_by_the_clock_of_the_gateway(shared_server):
    gateways = Installation(shared_server)
    async with gateways.gateway() as (cache, _):
        await put(cache, key(), answer(), ttl_s=60.0)
        assert 0 < gateways.client.pttl(gateways.value_key(key())) <= 60_000
        gateways.clock.now_s += 59.0
        assert await cache.find(key()) is not None
        gateways.clock.now_s += 1.0
        assert await cache.find(key()) is None, "though the clock of Redis may stand still"
        gateways.clock.now_s -= 3600.0
        assert await cache.find(key()) is not None, "a clock that was set back"
        gateways.clock.now_s += 86_400.0
        assert await cache.find(key()) is None


async def test_an_answer_is_gone_when_its_server_says_that_it_runs_something_else(shared_server):
    gateways = Installation(shared_server)
    first, second, stranger = key("1", server="s"), key("2", server="s"), key("3", server="t")
    async with gateways.gateway() as (one, _), gateways.gateway() as (other, _):
        await put(one, first, answer(fingerprint="fp_1"))
        await put(one, stranger, answer(fingerprint="fp_1"))
        assert await other.find(first) is not None
        await put(other, second, answer(fingerprint="fp_2"))
        assert await one.find(first) is None
        assert await one.find(second) is not None
        assert await one.find(stranger) is not None, "of another server"


POISON = {
    "nothing": lambda value: b"",
    "one byte": lambda value: b"x",
    "bytes at random": lambda value: bytes(range(256)) * 8,
    "no text": lambda value: b"\x00\x04\x93\xa1\xff\xa1" + value,
    "cut": lambda value: value[:-1],
    "cut in its head": lambda value: value[:10],
    "longer": lambda value: value + b"x",
    "one bit": lambda value: value[:-1] + bytes([value[-1] ^ 1]),
    "a long head": lambda value: b"\xff\xff" + value[2:],
}


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
async def test_what_somebody_else_has_written_is_not_found(shared_server, poison):
    gateways = Installation(shared_server)
    async with gateways.gateway() as (cache, backend):
        await put(cache, key(), answer())
        name = gateways.value_key(key())
        gateways.client.set(name, poison(gateways.client.get(name)))
        assert await cache.find(key()) is None
        await backend.describe()
        await put(cache, key(), answer("again"))
        assert (await cache.find(key()))[0] == answer("again")


async def test_another_answer_under_a_key_is_not_found(shared_server):
    gateways = Installation(shared_server)
    async with gateways.gateway() as (cache, _):
        for question in ("mine", "theirs"):
            await put(cache, key(question), answer(question))
        value = gateways.client.get(gateways.value_key(key("theirs")))
        gateways.client.set(gateways.value_key(key("mine")), value)
        assert await cache.find(key("mine")) is None
        assert await cache.find(key("theirs")) is not None


async def test_a_key_of_another_type_is_a_miss_and_hinders_nobody(shared_server):
    gateways = Installation(shared_server)
    async with gateways.gateway() as (cache, backend):
        gateways.client.rpush(gateways.value_key(key()), "a list")
        await put(cache, key("other"), answer())
        assert await cache.find(key()) is None
        assert [group.answers for group in await backend.describe()] == [1]
        assert await cache.find(key("other")) is not None


KEPT = Counter({("acme", "chat"): 600, ("acme", "code"): 5, ("other", "chat"): 7})
EPOCHS = {"chat": "", "code": "2"}


async def filled(cache):
    for (tenant, model), answers in KEPT.items():
        for n in range(answers):
            await put(cache, key(str(n), tenant, model, epoch=EPOCHS[model]), answer())


async def test_what_is_kept_is_described_as_a_memory_describes_it(shared_server):
    gateways = Installation(shared_server)
    memory = MemoryBackend(1 << 30, gateways.clock)
    await filled(AnswerCache(gateways.config, memory, gateways.clock))
    async with gateways.gateway() as (cache, backend):
        assert await backend.describe() == []
        await filled(cache)
        described = await backend.describe()
        assert described == await memory.describe()
        assert [(group.epoch, group.answers) for group in described] == [("", 600), ("2", 5), ("", 7)]
        assert isinstance(described[0], CachedAnswers)


@pytest.mark.parametrize(
    ("selection", "left"),
    [
        (AnswerSelection(), {}),
        (AnswerSelection(tenant="acme"), {("other", "chat"): 7}),
        (AnswerSelection(model="chat"), {("acme", "code"): 5}),
        (AnswerSelection(tenant="acme", model="code"), {("acme", "chat"): 600, ("other", "chat"): 7}),
        (AnswerSelection(tenant="nobody"), KEPT),
        (AnswerSelection(epoch="2"), KEPT - Counter({("acme", "code"): 5})),
        (AnswerSelection(epoch=""), {("acme", "code"): 5}),
        (AnswerSelection(epoch="", tenant="acme"), {("acme", "code"): 5, ("other", "chat"): 7}),
        (AnswerSelection(epoch="1"), KEPT),
        (AnswerSelection(name=key("3").name), KEPT - Counter({("acme", "chat"): 1})),
        (AnswerSelection(name=key("3").name, tenant="other"), KEPT),
        (AnswerSelection(name="*"), KEPT),
    ],
)
async def test_removes_what_is_selected_and_nothing_else(shared_server, selection, left):
    gateways = Installation(shared_server)
    async with gateways.gateway() as (cache, backend), Installation(shared_server).gateway() as (stranger, _):
        await put(stranger, key(), answer())
        await filled(cache)
        assert await backend.remove(selection) == KEPT.total() - sum(left.values())
        assert {(group.tenant, group.model): group.answers for group in await backend.describe()} == dict(left)
        assert await stranger.find(key()) is not None


async def test_an_answer_of_a_version_that_knew_no_epochs_is_found(shared_server):
    gateways = Installation(shared_server)
    async with gateways.gateway() as (cache, backend):
        await put(cache, key(), answer())
        value = gateways.client.get(gateways.value_key(key()))
        head_end = 2 + int.from_bytes(value[:2])
        head = msgspec.msgpack.encode(msgspec.msgpack.decode(value[2:head_end])[:3])
        former = len(head).to_bytes(2) + head + value[head_end:]
        assert len(former) < len(value)
        gateways.client.set(gateways.value_key(key()), former)
        assert await cache.find(key()) is not None
        assert await backend.remove(AnswerSelection(epoch="")) == 1


async def test_what_is_no_answer_goes_with_all_answers(shared_server):
    gateways = Installation(shared_server)
    async with gateways.gateway() as (_, backend):
        gateways.client.set(gateways.value_key(key()), b"poison")
        assert await backend.remove(AnswerSelection(tenant="acme")) == 0
        assert await backend.remove(AnswerSelection(epoch="")) == 0
        assert await backend.remove(AnswerSelection()) == 1


async def test_a_redis_that_was_killed_is_a_miss_and_then_found_again_empty(server, caplog):
    gateways = Installation(server)
    async with gateways.gateway() as (cache, backend):
        await put(cache, key(), answer())
        server.kill()
        for _ in range(20):
            assert await cache.find(key()) is None
            await put(cache, key(), answer())
        with pytest.raises(StoreUnavailable, match=r"cache\.url.*Try again"):
            await backend.describe()
        with pytest.raises(StoreUnavailable):
            await backend.remove(AnswerSelection())
        assert sum(record.levelno == logging.WARNING for record in caplog.records) <= 2, "one for each connection"
        server.start()
        assert await cache.find(key()) is None

        async def stored():
            gateways.clock.now_s += PAUSE_S
            await put(cache, key(), answer("new"))
            return await cache.find(key()) is not None

        await until(stored)
        assert (await cache.find(key()))[0] == answer("new")
        assert [group.answers for group in await backend.describe()] == [1]


async def test_a_redis_that_does_not_answer_holds_up_only_the_look_ups_that_asked_it(server):
    gateways = Installation(server, TIMEOUT_S)
    async with gateways.gateway() as (cache, _):
        await put(cache, key(), answer(), ttl_s=1e6)
        await finds_again(gateways, cache, key())
        sent, opened = counted_sends(cache), []
        cache._backend._reads._link.open = lambda: opened.append(1)
        server.freeze()
        try:
            assert await asyncio.gather(*(cache.find(key()) for _ in range(20))) == [None] * 20
            asked = len(sent)
            for _ in range(200):
                assert await cache.find(key()) is None
            assert len(sent) == asked, "later ones do not ask"
        finally:
            server.thaw()

        async def found():
            return await cache.find(key()) is not None

        await until(found)  # with the late replies, without another connection or a pause
        assert opened == []


async def test_a_redis_that_hangs_for_long_is_connected_to_again(server):
    gateways = Installation(server, TIMEOUT_S)
    async with gateways.gateway() as (cache, backend):
        await put(cache, key(), answer(), ttl_s=1e6)
        await finds_again(gateways, cache, key())
        backend._reads._link._late_s = TIMEOUT_S
        server.freeze()
        try:

            async def given_up():
                assert await cache.find(key()) is None
                return not backend._reads.is_open

            assert not await given_up()
            await until(given_up)
        finally:
            server.thaw()
        await finds_again(gateways, cache, key())


def counted_sends(cache):
    """Counts from now on what look-ups send to Redis."""
    link, sent = cache._backend._reads._link, []
    send = link.send

    def counting(*commands):
        sent.append(commands)
        return send(*commands)

    link.send = counting
    return sent


async def test_a_look_up_is_one_round_trip(shared_server):
    gateways = Installation(shared_server)
    async with gateways.gateway() as (cache, _):
        await put(cache, key(server="s"), answer(fingerprint="fp"))
        sent = counted_sends(cache)
        assert await cache.find(key(server="s")) is not None
        assert [[command[0] for command in commands] for commands in sent] == [["MGET"]]


async def test_redis_is_tried_after_pauses_that_become_longer_while_it_is_away(server):
    gateways = Installation(server)
    async with gateways.gateway() as (cache, backend):
        link, attempts = backend._reads._link, []
        open_link = link.open

        async def noting():
            attempts.append(gateways.clock.now_s)
            await open_link()

        link.open = noting
        server.kill()
        while len(attempts) < 9:
            assert await cache.find(key()) is None
            await asyncio.sleep(0)
            if backend._reads._opening.done():
                gateways.clock.now_s += FIRST_PAUSE_S / 10
        gaps = [later - before for before, later in pairwise(attempts)]
        for before, gap in pairwise(gaps):
            assert gap == pytest.approx(min(2 * before, PAUSE_S), rel=0.1)
        assert gaps[-1] == pytest.approx(PAUSE_S, rel=0.02)
        server.start()

        async def answers_again():
            gateways.clock.now_s += PAUSE_S
            await cache.find(key())
            return backend._reads.is_open

        await until(answers_again)
        await cache.find(key())
        assert backend._reads._pause_s == FIRST_PAUSE_S, "there was a reply"


async def test_a_long_answer_that_redis_does_not_take_holds_up_no_look_up(server):
    gateways = Installation(server)
    async with gateways.gateway() as (cache, backend):
        backend._writes._link._longest_s = TIMEOUT_S
        server.freeze()
        try:
            # More than the buffers of a socket hold
            stored = cache.store(key(), answer("x" * 900_000), 60.0)
            async with asyncio.timeout(300):
                await stored
        finally:
            server.thaw()
        await finds_nothing_wrong(gateways, cache)


async def finds_nothing_wrong(gateways, cache):
    """Waits until answers are stored and found."""

    async def stored():
        gateways.clock.now_s += PAUSE_S
        await put(cache, key("later"), answer("later"))
        return await cache.find(key("later")) is not None

    await until(stored)


async def test_starts_without_redis_and_finds_it(server):
    gateways = Installation(server)
    server.kill()
    async with gateways.gateway() as (cache, _):
        assert await cache.find(key()) is None
        server.start()
        await finds_nothing_wrong(gateways, cache)


async def test_an_operator_does_not_wait_for_a_look_up_to_find_redis_again(server):
    gateways = Installation(server)
    async with gateways.gateway() as (_, backend):
        server.kill()
        server.start()
        await until(lambda: asyncio.sleep(0, not backend._writes.is_open))
        gateways.clock.now_s += PAUSE_S
        assert await backend.describe() == []


async def test_a_name_that_is_too_long_is_not_kept(shared_server):
    gateways = Installation(shared_server)
    async with gateways.gateway() as (cache, backend):
        await put(cache, key(model="m" * 2000), answer())
        assert await backend.describe() == []


def test_a_url_that_is_none_is_refused():
    with pytest.raises(ConfigInvalid, match=r"cache\.url is not the URL"):
        RedisBackend(CacheConfig(url=Secret("http://nowhere", "")), FakeClock())
    with pytest.raises(ConfigInvalid, match=r"cache\.url is missing"):
        RedisBackend(CacheConfig(), FakeClock())
