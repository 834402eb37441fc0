"""Text that goes out from where it comes in, while whoever reads the answer sleeps."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from maitred.core.context import RequestContext
from maitred.core.errors import ReplicaLost
from maitred.core.inference import TextDelta
from maitred.core.request import FinishReason, TokenDelta
from maitred.core.service import PushStream
from maitred.replica.engine.stream import EngineStream
from tests.unit.app.request.test_pipeline import MemoryReplica, ask, ids, pipeline


class Outlet:
    """Notes what it gets."""

    def __init__(self):
        self.open = True
        self.parts = []
        self.failure = None

    def send(self, parts):
        if self.failure is not None:
            raise self.failure
        self.parts += parts


class DrivenReplica(MemoryReplica):
    """Its one stream says what a test lets it say."""

    def __init__(self):
        super().__init__()
        self.opened = asyncio.Event()

    @asynccontextmanager
    async def generate(self, request):
        self.stream = EngineStream("wire", request, lambda *cancel: self.cancelled.append(cancel), lambda *pause: None)
        self.open += 1
        self.opened.set()
        try:
            yield self.stream
        finally:
            self.stream.close()
            self.open -= 1

    def say(self, text="", finish=None):
        self.stream.push(TokenDelta(0, ids(text) if text else [], finish))
        self.stream.wake()


@asynccontextmanager
async def answering(asked, context=None):
    """The answer after its first part, read up to there, and waited for."""
    replica, outlet = DrivenReplica(), Outlet()
    async with pipeline(replica).generate(asked, context or RequestContext("req", 0.0)) as answer:
        first = asyncio.ensure_future(anext(answer))
        await replica.opened.wait()
        replica.say("a")
        assert await first == [TextDelta(0, "a")]
        assert isinstance(answer, PushStream)
        answer.push_to(outlet)
        reading = asyncio.ensure_future(anext(answer))
        await asyncio.sleep(0)
        yield replica, outlet, reading, answer
        reading.cancel()
        await asyncio.wait([reading])
    assert replica.open == 0


async def test_text_goes_out_at_once_and_its_reader_sleeps_on():
    context = RequestContext("req", 0.0)
    async with answering(ask(), context) as (replica, outlet, reading, _):
        replica.say("b")
        replica.say("c")
        assert outlet.parts == [TextDelta(0, "b"), TextDelta(0, "c")]
        await asyncio.sleep(0)
        assert not reading.done()
        assert context.completion_tokens == 3
        assert len(context.gaps_s) == 2
    assert replica.cancelled == [("wire", None)]


async def test_the_end_is_for_the_reader():
    async with answering(ask()) as (replica, outlet, reading, answer):
        replica.stream.push(TokenDelta(0, ids("b")))
        replica.say("c", FinishReason.STOP)
        assert await reading == [TextDelta(0, "bc", FinishReason.STOP)]
        assert outlet.parts == []
        with pytest.raises(StopAsyncIteration):
            await anext(answer)


async def test_deltas_wait_for_the_reader_while_the_sink_is_closed():
    async with answering(ask()) as (replica, outlet, reading, answer):
        outlet.open = False
        replica.say("b")
        outlet.open = True
        replica.say("c")  # the reader has not got what was before it
        assert await reading == [TextDelta(0, "bc")]
        reading = asyncio.ensure_future(anext(answer))
        await asyncio.sleep(0)
        replica.say("d")
        assert outlet.parts == [TextDelta(0, "d")]
        replica.say(finish=FinishReason.LENGTH)
        assert await reading == [TextDelta(0, "", FinishReason.LENGTH)]


async def test_what_must_be_looked_at_is_read():
    async with answering(ask(stops=("z",))) as (replica, outlet, reading, _):
        replica.say("b")
        assert await reading == [TextDelta(0, "b")]
        assert outlet.parts == []


async def test_a_failure_of_the_sink_is_raised_by_the_reader():
    async with answering(ask()) as (replica, outlet, reading, _):
        outlet.failure = RuntimeError("no")
        replica.say("b")
        with pytest.raises(RuntimeError, match="no"):
            await reading
    assert replica.cancelled == [("wire", None)]


async def test_a_loss_after_pushed_deltas_is_raised():
    async with answering(ask()) as (replica, outlet, reading, _):
        replica.say("b")
        replica.stream.fail(ReplicaLost())
        with pytest.raises(ReplicaLost):
            await reading
        assert outlet.parts == [TextDelta(0, "b")]
