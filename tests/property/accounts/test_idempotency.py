"""The store of recordings against a model on paper: what anybody reads is what was written, and the bound holds."""

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from maitred.cache.config import IdempotencyConfig
from maitred.cache.idempotency import IdempotencyKey, RecordedHead
from maitred.cache.memory import MemoryIdempotencyStore
from maitred.cache.recording import ENTRY_BYTES, PIECE_BYTES
from maitred.core.errors import IdempotencyConflict, ReplicaLost

HEAD = RecordedHead(200, b"text/event-stream", (), streams=True)
LARGEST_CHUNK = 300_000


class PaperClock:
    now_s = 0.0

    def monotonic_s(self):
        return self.now_s

    def wall_s(self):
        return self.now_s


class Work:
    """One recording with what was written to it, all of it, and the calls that still wait to be written."""

    def __init__(self, name, body, recording):
        self.name, self.body, self.recording = name, body, recording
        self.written = bytearray()
        self.adding = None
        self.state = "running"
        self.ended_s = None


class StoreMachine(RuleBasedStateMachine):
    """Any number of writers and readers, at any pace."""

    works = Bundle("works")
    readers = Bundle("readers")

    @initialize(max_bytes=st.integers(1 << 20, 3 << 20), max_answer_bytes=st.integers(1 << 10, 2 << 20))
    def make(self, max_bytes, max_answer_bytes):
        self.loop = asyncio.new_event_loop()
        self.clock = PaperClock()
        self.max_bytes = max_bytes
        self.store = MemoryIdempotencyStore(
            IdempotencyConfig(ttl_s=10, max_bytes=max_bytes, max_answer_bytes=max_answer_bytes), self.clock
        )
        self.known = {}  # name -> the work that has the key, by the rules
        self.all = []
        self.open = []
        self.serial = 0

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    @rule(target=works, name=st.sampled_from("abcdef"), body=st.sampled_from([b"0", b"1"]), reads=st.booleans())
    def claim(self, name, body, reads):
        known = self.known.get(name)
        expired = known is not None and known.state == "finished" and self.clock.now_s - known.ended_s >= 10
        self.serial += 1
        try:
            claim = self.run(self.store.claim(IdempotencyKey("t/k", "/r", name), body, f"r{self.serial}"))
        except IdempotencyConflict:
            assert known is not None
            assert not expired
            assert known.body != body or not known.recording.kept
            return known
        if not claim.fresh:
            # Never somebody else's answer, never one that is not all there.
            assert claim.recording is known.recording
            assert known.body == body
            assert known.recording.kept
            assert not expired
            if reads:
                self.open.append((claim.recording.reader(), known, bytearray()))
            return known
        # Never a second generation while the first runs or is kept.
        assert known is None or known.state == "failed" or expired or known.recording.forgotten
        assert known is None or known.state != "running"
        work = Work(name, body, claim.recording)
        self.run(claim.recording.begin(HEAD))
        if reads:
            self.open.append((claim.recording.reader(), work, bytearray()))
        self.known[name] = work
        self.all.append(work)
        return work

    @rule(work=works, size=st.integers(1, LARGEST_CHUNK))
    def add(self, work, size):
        if work.state != "running" or (work.adding is not None and not work.adding.done()):
            return
        data = bytes([len(work.written) % 251]) * size
        work.written += data
        work.adding = self.loop.create_task(work.recording.add(data))
        self.turn()
        assert work.adding.done() or not work.recording.kept  # who is kept waits for nobody

    @rule(work=works, ends_well=st.booleans())
    def end(self, work, ends_well):
        if work.state != "running" or (work.adding is not None and not work.adding.done()):
            return
        if ends_well:
            self.run(work.recording.finish())
            work.state, work.ended_s = "finished", self.clock.now_s
        else:
            self.run(work.recording.fail(ReplicaLost()))
            work.state = "failed"

    @rule(data=st.data())
    def read(self, data):
        if not self.open:
            return
        index = data.draw(st.integers(0, len(self.open) - 1))
        reader, work, seen = self.open[index]
        if work.state == "running" and len(seen) == len(work.written):
            return  # would wait
        try:
            piece = self.run(reader.piece())
        except ReplicaLost:
            assert work.state == "failed"
            assert seen == work.written
            self.close(index)
        except IdempotencyConflict:
            assert not work.recording.kept
            self.close(index)
        else:
            assert len(piece) <= PIECE_BYTES
            assert bool(piece) == (len(seen) < len(work.written))
            seen += piece
            assert work.written.startswith(seen)
            if not piece:
                assert work.state == "finished"
                self.close(index)
        self.turn()

    @rule(data=st.data())
    def leave(self, data):
        if self.open:
            self.close(data.draw(st.integers(0, len(self.open) - 1)))
            self.turn()

    def close(self, index):
        reader, _, _ = self.open.pop(index)
        reader.close()
        reader.close()  # does no harm

    @rule(seconds=st.integers(0, 12))
    def wait(self, seconds):
        self.clock.now_s += seconds

    def turn(self):
        async def idle():
            for _ in range(3):
                await asyncio.sleep(0)

        self.run(idle())

    @invariant()
    def the_books_are_right(self):
        if not hasattr(self, "store"):
            return
        alive = [
            work.recording
            for work in self.all
            if not work.recording.forgotten or work.recording.readers or not work.recording.ended
        ]
        assert self.store.held_bytes == sum(recording.size for recording in alive)
        busy = sum(1 for recording in alive if recording.readers or not recording.ended)
        assert self.store.held_bytes <= self.max_bytes + busy * (ENTRY_BYTES + PIECE_BYTES + 2 * LARGEST_CHUNK)
        if not busy:
            assert self.store.held_bytes <= self.max_bytes

    def teardown(self):
        if hasattr(self, "store"):
            try:
                self.everything_ends()
            finally:
                self.loop.close()

    def everything_ends(self):
        while self.open:
            self.close(0)
        self.turn()
        for work in self.all:
            assert work.adding is None or work.adding.done()
            if work.state == "running":
                self.run(work.recording.finish())
        self.clock.now_s += 10
        claim = self.run(self.store.claim(IdempotencyKey("t/k", "/r", "new"), b"", "r"))
        self.run(claim.recording.fail(ReplicaLost()))
        assert (len(self.store), self.store.held_bytes) == (0, 0)


StoreMachine.TestCase.settings = settings(max_examples=75, stateful_step_count=50, deadline=None)
test_the_store = StoreMachine.TestCase
