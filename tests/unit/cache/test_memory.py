"""Recordings in memory: who claims, who reads what, and what is forgotten when."""

import asyncio

import pytest

from maitred.cache.config import IdempotencyConfig
from maitred.cache.idempotency import IdempotencyKey, RecordedHead
from maitred.cache.memory import MemoryIdempotencyStore
from maitred.cache.recording import ENTRY_BYTES, PIECE_BYTES
from maitred.core.errors import IdempotencyConflict, ReplicaLost

HEAD = RecordedHead(200, b"text/event-stream", (), streams=True)
BODY = b"#" * 32


class StoppedClock:
    """Moves only when a test sets it."""

    now_s = 50.0

    def monotonic_s(self):
        return self.now_s

    def wall_s(self):
        return self.now_s


def key(value="k", caller="acme/key1", route="/v1/chat/completions"):
    return IdempotencyKey(caller, route, value)


class Bench:
    """A store with its clock, and short ways to use it."""

    def __init__(self, **bounds):
        self.clock = StoppedClock()
        self.store = MemoryIdempotencyStore(IdempotencyConfig(**bounds), self.clock)

    async def claim(self, name="k", body=BODY):
        return await self.store.claim(key(name), body, f"req-{name}")

    async def fresh(self, name="k"):
        claim = await self.claim(name)
        assert claim.fresh
        await claim.recording.begin(HEAD)
        return claim.recording

    async def whole(self, name, data):
        recording = await self.fresh(name)
        await recording.add(data)
        await recording.finish()
        return recording

    async def is_fresh(self, name):
        claim = await self.claim(name)
        if claim.fresh:
            await claim.recording.fail(ReplicaLost())
        return claim.fresh


async def read(reader):
    pieces = []
    with reader:
        while piece := await reader.piece():
            pieces.append(piece)
    return b"".join(pieces)


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_first_claims_and_the_others_read_along():
    bench = Bench()
    recording = await bench.fresh()
    first = asyncio.create_task(read(recording.reader()))
    await recording.add(b"one ")
    await settle()
    claim = await bench.claim()
    assert not claim.fresh
    assert claim.recording.request_id == "req-k"
    second = asyncio.create_task(read(claim.recording.reader()))
    await recording.add(b"two")
    await recording.finish()
    late = (await bench.claim()).recording.reader()
    assert await late.head() == HEAD
    assert [await first, await second, await read(late)] == [b"one two"] * 3


async def test_readers_wait_for_the_beginning():
    bench = Bench()
    claim = await bench.claim()
    head = asyncio.create_task(claim.recording.reader().head())
    await settle()
    assert not head.done()
    await claim.recording.begin(HEAD)
    assert await head == HEAD


async def test_keys_differ_by_caller_route_and_value():
    bench = Bench()
    keys = [key(), key("other"), key(caller="acme/key2"), key(route="/v1/completions")]
    claims = [await bench.store.claim(key, BODY, "r") for key in keys]
    assert all(claim.fresh for claim in claims)
    assert len(bench.store) == 4


async def test_another_body_is_a_conflict_while_it_runs_and_after():
    bench = Bench()
    recording = await bench.fresh()
    with pytest.raises(IdempotencyConflict, match="another body, by request req-k"):
        await bench.claim(body=b"!" * 32)
    await recording.finish()
    with pytest.raises(IdempotencyConflict, match="another body"):
        await bench.claim(body=b"!" * 32)


async def test_a_failure_reaches_readers_after_the_recorded_part_and_frees_the_key():
    bench = Bench()
    claim = await bench.claim()
    early = asyncio.create_task(claim.recording.reader().head())
    await settle()
    await claim.recording.fail(ReplicaLost())
    with pytest.raises(ReplicaLost):
        await early
    recording = await bench.fresh()
    await recording.add(b"so far")
    reader = recording.reader()
    await recording.fail(ReplicaLost())
    assert await bench.is_fresh("k")
    assert await reader.head() == HEAD
    assert await reader.piece() == b"so far"
    with pytest.raises(ReplicaLost):
        await reader.piece()
    assert bench.store.held_bytes == ENTRY_BYTES + 6 + ENTRY_BYTES  # it, and the head that nobody closed
    reader.close()
    assert bench.store.held_bytes == ENTRY_BYTES


async def test_answers_age_from_their_end():
    bench = Bench(ttl_s=10)
    recording = await bench.fresh("slow")
    bench.clock.now_s += 100
    await recording.finish()
    bench.clock.now_s += 9.9
    assert not await bench.is_fresh("slow")
    bench.clock.now_s += 0.1
    assert await bench.is_fresh("slow")
    assert bench.store.held_bytes == 0


async def test_an_expired_answer_is_read_to_its_end():
    bench = Bench(ttl_s=10)
    recording = await bench.whole("k", b"x" * 100)
    reader = recording.reader()
    bench.clock.now_s += 20
    assert await bench.is_fresh("k")
    assert bench.store.held_bytes == ENTRY_BYTES + 100
    assert await read(reader) == b"x" * 100
    assert bench.store.held_bytes == 0


async def test_who_ended_first_goes_first_but_not_under_a_readers_eyes():
    size = 1 << 18
    bench = Bench(max_bytes=4 * (size + ENTRY_BYTES) + ENTRY_BYTES, max_answer_bytes=size)
    begun_first = await bench.fresh("ends last")
    recordings = {name: await bench.whole(name, b"x" * size) for name in ("a", "b", "c")}
    await begun_first.add(b"x" * size)
    await begun_first.finish()
    reader = recordings["a"].reader()
    await bench.whole("d", b"x" * size)  # needs the room of one
    names = ("a", "b", "c", "ends last", "d")
    assert [await bench.is_fresh(name) for name in names] == [False, True, False, False, False]
    assert len(await read(reader)) == size
    await bench.whole("e", b"x" * size)
    assert await bench.is_fresh("a")
    assert bench.store.held_bytes <= 4 * (size + ENTRY_BYTES) + ENTRY_BYTES


async def test_a_large_answer_is_read_in_pieces():
    bench = Bench()
    recording = await bench.whole("k", b"x" * (2 * PIECE_BYTES + 1))
    with recording.reader() as reader:
        assert [len(await reader.piece()) for _ in range(4)] == [PIECE_BYTES, PIECE_BYTES, 1, 0]


async def test_an_answer_beyond_the_largest_size_passes_through():
    bench = Bench(max_answer_bytes=1024)
    recording = await bench.fresh()
    reading = asyncio.create_task(read(recording.reader()))
    written = b""
    for i in range(2000):
        chunk = b"%08d" % i * 64
        written += chunk
        await recording.add(chunk)
        assert bench.store.held_bytes <= ENTRY_BYTES + PIECE_BYTES + 1024
    with pytest.raises(IdempotencyConflict, match="too large to keep"):
        await bench.claim()
    await recording.finish()
    assert await reading == written
    assert bench.store.held_bytes == ENTRY_BYTES
    with pytest.raises(IdempotencyConflict, match="too large to keep"):
        await bench.claim()


async def test_an_answer_that_is_not_kept_waits_for_the_fastest_reader_and_breaks_off_the_slowest():
    bench = Bench(max_answer_bytes=1024)
    recording = await bench.fresh()
    fast, slow = recording.reader(), recording.reader()
    await recording.add(b"x" * PIECE_BYTES)
    adding = asyncio.create_task(recording.add(b"y" * PIECE_BYTES))
    await settle()
    assert not adding.done()
    assert await fast.piece() == b"x" * PIECE_BYTES
    await settle()
    assert adding.done()
    assert not recording.unwanted
    assert await fast.piece() == b"y" * PIECE_BYTES
    fast.close()
    # Nobody goes on for one who has been broken off, even if it does not know yet.
    assert recording.unwanted
    with pytest.raises(IdempotencyConflict, match="too slowly"):
        await slow.piece()
    slow.close()


async def test_the_work_of_an_answer_that_is_not_kept_waits_for_nobody_who_left():
    bench = Bench(max_answer_bytes=1024)
    recording = await bench.fresh()
    reader = recording.reader()
    adding = asyncio.create_task(recording.add(b"x" * 3 * PIECE_BYTES))
    await settle()
    assert not adding.done()
    reader.close()
    await settle()
    assert adding.done()
    assert recording.unwanted
    assert bench.store.held_bytes == ENTRY_BYTES


async def test_a_store_full_of_what_runs_keeps_no_more():
    bench = Bench(max_bytes=1 << 20, max_answer_bytes=1 << 20)
    first, second = await bench.fresh("first"), await bench.fresh("second")
    await first.add(b"x" * (1 << 20 - 1))
    reading = asyncio.create_task(read(second.reader()))
    await second.add(b"x" * (1 << 19))
    await second.add(b"y" * 10)
    await second.finish()
    assert await reading == b"x" * (1 << 19) + b"y" * 10
    with pytest.raises(IdempotencyConflict, match="too large to keep"):
        await bench.claim("second")
    await first.finish()
    assert not (await bench.claim("first")).fresh


async def test_one_organisation_drives_out_its_own_recordings_only():
    bench = Bench(max_bytes=20 * (ENTRY_BYTES + 1000))

    async def record(organisation, name):
        made = IdempotencyKey(organisation, "/r", name, organisation)
        recording = (await bench.store.claim(made, BODY, name)).recording
        await recording.begin(HEAD)
        await recording.add(b"x" * 1000)
        await recording.finish()
        return made

    theirs = [await record("victim", f"v{number}") for number in range(5)]
    flood = [await record("greedy", f"g{number}") for number in range(100)]
    for made in theirs:
        assert not (await bench.store.claim(made, BODY, "again")).fresh
    assert (await bench.store.claim(flood[0], BODY, "again")).fresh
    assert not (await bench.store.claim(flood[-1], BODY, "again")).fresh
    bench.clock.now_s += 1e9
    await record("victim", "later")
    assert len(bench.store) == 2, "the last, and what was claimed again"
    assert bench.store._ended_bytes.keys() == bench.store._ended_of.keys() == {"victim"}
