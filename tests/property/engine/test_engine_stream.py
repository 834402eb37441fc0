"""Random interleavings of steps, reads, cancellations, departures and deaths, against a simple account of them.

The connection is driven by hand, without a socket: Hypothesis chooses what the engine says, in chunks of any size, and
when the event loop gets a turn. However the events fall, a stream hands out exactly the deltas that the engine sent
for choices not yet cancelled, in order; it ends once, completely or with an error that says why not; and nothing of
it is left behind.
"""

import asyncio
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.errors import Bug, CallerError, ReplicaLost
from maitred.core.replica import LoadReport
from maitred.core.request import EngineRequest, FinishReason, SamplingParams, TokenDelta
from maitred.replica.engine.connection import EngineConnection
from maitred.testing.script import SCRIPTED_CARD
from maitred.wire.frames import (
    PROTOCOL_VERSION,
    Cancel,
    EngineHello,
    FrameReader,
    Pause,
    Rejection,
    Step,
    ToEngine,
    TokenOutput,
    encode_frame,
)

STREAMS = 2
CHOICES = 2
ALL = frozenset(range(CHOICES))


class Wire(asyncio.Transport):
    """Reads back what the connection sends."""

    def __init__(self):
        super().__init__()
        self.messages = []
        self.aborted = False
        self._reader = FrameReader(ToEngine)

    def write(self, data):
        assert not self.aborted, "something was written to a dead connection"
        self.messages += self._reader.feed(data)

    def abort(self):
        self.aborted = True


class Account:
    """What one stream must do, in the plainest terms, and a reader that holds it to that."""

    def __init__(self, stream, eager, hears):
        self.stream = stream
        self.hears = hears  # every so many tokens it hears one beside its reader
        stream.listen(self.hear)
        stream.on_unread = self.tell_unread
        self.told = 0
        self.eager = eager  # has a read under way at every turn
        self.engine_runs = set(ALL)  # by the engine's lights, which has not heard of cancellations
        self.cancelled = set()
        self.unread = []
        self.ending = None  # the exception that a read must end with, once nothing is unread
        self.left = False
        self.reading = None
        self.endings_read = set()

    @property
    def running(self):
        return set() if self.ending else self.engine_runs - self.cancelled

    def report_pending(self, delta):
        if not self.left and delta.index not in self.cancelled:
            self.unread.append(delta)
        if delta.finish:
            self.engine_runs.discard(delta.index)

    def fail(self, error):
        if self.running:
            self.ending = error

    def cancel(self, index):
        if index in self.running:
            self.cancelled.add(index)
        self.unread = [delta for delta in self.unread if delta.index != index]

    def leave(self):
        self.left = True
        self.unread = []
        self.ending = self.ending or Bug

    def hear(self, deltas):
        assert self.reading is not None, "something was heard of which no reader waited"
        assert deltas == self.unread[: len(deltas)]
        if not self.hears or deltas[0].tokens[0] % self.hears:
            return False
        del self.unread[: len(deltas)]
        return True

    def tell_unread(self, tokens):
        assert tokens > 0
        self.told += tokens

    def read(self):
        if self.reading is None:
            self.reading = asyncio.ensure_future(anext(self.stream))

    async def turn(self):
        """Gives the reader a turn; it must have done what the account says."""
        if self.eager:
            self.read()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if self.reading is None:
            assert self.told >= len(self.unread), "nobody was told of what is unread"
            return
        if not self.reading.done():
            assert not self.unread, "unread deltas were held back"
            assert self.running, "a stream that was over made its reader wait"
            return
        failure = self.reading.exception()
        if self.unread:
            assert failure is None, f"unread deltas were lost: {failure!r}"
            assert self.reading.result() == self.unread
            self.unread, self.told = [], 0
        else:
            assert not self.running
            assert isinstance(failure, self.ending or StopAsyncIteration)
            if not self.left:
                self.endings_read.add(type(failure))
        self.reading = None


class Engine:
    """The other end, which keeps to the protocol until the test breaks it."""

    def __init__(self, chunk_bytes):
        self.connection = EngineConnection()
        self.wire = Wire()
        self.connection.connection_made(self.wire)
        self._chunk_bytes = chunk_bytes
        self._sequence = 0
        self._token = 0
        self.say(encode_frame(EngineHello(PROTOCOL_VERSION, 1, 1, SCRIPTED_CARD, LoadReport())))

    def say(self, data):
        for start in range(0, len(data), self._chunk_bytes):
            self.connection.data_received(data[start : start + self._chunk_bytes])

    def step(self, outputs=(), rejections=(), *, skip=0):
        self._sequence += 1 + skip
        return encode_frame(Step(self._sequence, list(outputs), list(rejections), LoadReport()))

    def run(self, accounts, choices):
        outputs = []
        for account, index, last in ((accounts[who], index, last) for who, index, last in choices):
            if index in account.engine_runs:
                self._token += 1
                delta = TokenDelta(index, [self._token], FinishReason.STOP if last else None)
                outputs.append(TokenOutput(account.stream.wire_id, delta))
                account.report_pending(delta)
        self.say(self.step(outputs))

    def reject(self, account):
        if account.engine_runs == ALL:
            account.fail(CallerError)
            account.engine_runs = set()
            self.say(self.step(rejections=[Rejection(account.stream.wire_id, "no")]))

    def die(self, how, accounts):
        if how == "afterlife":
            dead = [(a, i) for a in accounts if not a.left for i in ALL - a.engine_runs - a.cancelled]
            for account, index in dead[:1]:
                self.say(self.step([TokenOutput(account.stream.wire_id, TokenDelta(index, [0]))]))
                assert self.wire.aborted
        elif how == "half":
            self.say(self.step()[:-1])
        elif how == "garbage":
            self.say(b"\0\0\0\1\xc1")
        elif how == "gap":
            self.say(self.step(skip=1))
        if how in ("garbage", "gap"):
            assert self.wire.aborted
        self.connection.connection_lost(None)
        for account in accounts:
            account.fail(ReplicaLost)


who = st.integers(0, STREAMS - 1)
index = st.integers(0, CHOICES - 1)
turn = st.booleans()  # whether the event loop runs before the next event
event = st.one_of(
    st.tuples(st.just("step"), st.lists(st.tuples(who, index, st.booleans()), max_size=6), turn),
    st.tuples(st.just("read"), who, turn),
    st.tuples(st.just("cancel"), who, index, turn),
    st.tuples(st.just("leave"), who, turn),
    st.tuples(st.just("pause"), who, st.booleans(), turn),
    st.tuples(st.just("reject"), who, turn),
)
deaths = st.sampled_from(["eof", "half", "garbage", "gap", "afterlife"])


@settings(max_examples=150, deadline=None)
@given(
    before=st.lists(event, max_size=30),
    death=st.tuples(st.just("die"), deaths, turn),
    after=st.lists(event, max_size=10),
    chunk_bytes=st.integers(1, 200),
    eager=st.booleans(),
    hears=st.integers(0, 3),
)
def test_every_stream_ends_once_and_leaves_nothing(before, death, after, chunk_bytes, eager, hears):
    asyncio.run(scenario([*before, death, *after], chunk_bytes, eager, hears))


async def scenario(events, chunk_bytes, eager, hears):
    engine = Engine(chunk_bytes)
    connection = engine.connection
    request = EngineRequest("the-same-id", [1], SamplingParams(max_tokens=100, seed=0, n=CHOICES))
    accounts = [Account(connection.submit(request), eager, hears) for _ in range(STREAMS)]
    for name, *arguments, turn in events:
        alive = not engine.wire.aborted
        match name, arguments:
            case "step", [choices] if alive:
                engine.run(accounts, choices)
            case "reject", [who] if alive:
                engine.reject(accounts[who])
            case "die", [how]:
                engine.die(how, accounts)
            case "read", [who]:
                accounts[who].read()
            case "cancel", [who, index]:
                accounts[who].stream.cancel(index)
                accounts[who].cancel(index)
            case "pause", [who, paused]:
                stream = accounts[who].stream
                (stream.pause if paused else stream.resume)()
            case "leave", [who]:
                connection.release(accounts[who].stream)
                accounts[who].leave()
        if turn:
            for account in accounts:
                await account.turn()

    for account in accounts:
        while not account.left and not account.endings_read:
            account.read()
            await account.turn()
        account.read()
        with suppress(Exception):
            await account.reading
        connection.release(account.stream)
        assert len(account.endings_read) <= 1, "a stream ended in two ways"
    assert connection._streams == {}
    cancels = [(m.request_id, m.index) for m in engine.wire.messages if isinstance(m, Cancel)]
    assert len(set(cancels)) == len(cancels), "something was cancelled twice"
    for account in accounts:
        known = [
            m.paused for m in engine.wire.messages if isinstance(m, Pause) and m.request_id == account.stream.wire_id
        ]
        assert known == [number % 2 == 0 for number in range(len(known))], "the engine got what it knew already"
