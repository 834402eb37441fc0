"""The beginning of an answer by whichever of two replicas is the first, with replicas that do as they are told."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from maitred.app.models.router import Router
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.request.pipeline import Pipeline
from maitred.app.request.response import PeekableStream, open_hedged
from maitred.core.clock import SystemClock
from maitred.core.context import RequestContext
from maitred.core.errors import ReplicaLost, ReplicaUnavailable
from maitred.core.request import FinishReason, TokenDelta
from maitred.dispatch.config import DispatchConfig, HedgingConfig
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import Endpoint
from maitred.routing.catalog import Catalog, ServedModel
from tests.support.admission_services import Desk
from tests.unit.app.request.test_pipeline import EOS, TOKENIZER, MemoryReplica, MemoryStream, ask, ids


class Spare:
    def __init__(self):
        self.endpoint = SimpleNamespace(name="b")
        self.settled = []

    def on_submitted(self):
        pass

    def settle(self, *, won):
        self.settled.append(won)


class Seat:
    """Is late at once, where there is a spare replica."""

    def __init__(self, spare, after_s=0.0):
        self.given, self.after_s = spare, after_s
        self.asked = 0

    def hedge_after_s(self):
        return self.after_s

    def hedge(self):
        self.asked += 1
        return self.given

    def on_submitted(self):
        pass


class Replicas:
    """What each of two does: `answers` say when they begin, or fail."""

    def __init__(self):
        self.answers = {name: asyncio.get_running_loop().create_future() for name in "ab"}
        self.open, self.ended = [], []

    @asynccontextmanager
    async def at(self, post, submitted):
        self.open.append(post.name)
        try:
            submitted()
            yield PeekableStream(self._items(post.name))
        finally:
            self.open.remove(post.name)
            self.ended.append(post.name)

    async def _items(self, name):
        yield await asyncio.shield(self.answers[name])
        yield "more"


class Race:
    """One in a task."""

    def __init__(self, seat):
        self.seat, self.replicas, self.tally = seat, Replicas(), RequestContext("req-1", 0.0)
        self.running = AsyncExitStack()
        self.task = asyncio.create_task(
            open_hedged(seat, SimpleNamespace(name="a"), self.replicas.at, self.running, self.tally)
        )

    async def both_open(self):
        while len(self.replicas.open) < 2:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)

    def say(self, name, failure=None):
        future = self.replicas.answers[name]
        if failure is None:
            future.set_result(f"from {name}")
        else:
            future.set_exception(failure)


@pytest.mark.parametrize(("winner", "loser", "hedged"), [("a", "b", "first"), ("b", "a", "second")])
async def test_the_first_to_begin_is_read_and_the_other_is_left_at_once(winner, loser, hedged):
    race = Race(Seat(spare := Spare()))
    await race.both_open()
    race.say(winner)
    post, answer = await race.task
    assert post.name == winner
    assert (race.replicas.open, race.replicas.ended) == ([winner], [loser])
    assert (spare.settled, race.tally.hedged) == ([winner == "b"], hedged)
    assert [item async for item in answer] == [f"from {winner}", "more"], "what was waited for is not lost"
    await race.running.__aexit__(None, None, None)
    assert race.replicas.open == []


@pytest.mark.parametrize("fails", ["a", "b"])
async def test_one_that_fails_leaves_it_to_the_other(fails):
    race = Race(Seat(spare := Spare()))
    await race.both_open()
    race.say(fails, ReplicaLost())
    other = "b" if fails == "a" else "a"
    await asyncio.sleep(0)
    race.say(other)
    post, _ = await race.task
    assert (post.name, spare.settled) == (other, [other == "b"])
    await race.running.__aexit__(None, None, None)
    assert race.replicas.open == []


async def test_where_both_fail_the_failure_of_the_first_is_told():
    race = Race(Seat(spare := Spare()))
    await race.both_open()
    race.say("b", ReplicaUnavailable())
    race.say("a", ReplicaLost())
    with pytest.raises(ReplicaLost):
        await race.task
    assert (race.replicas.open, spare.settled) == ([], [False])


async def test_one_that_fails_before_it_is_late_is_followed_by_nobody():
    race = Race(Seat(spare := Spare(), after_s=60.0))
    race.say("a", ReplicaLost())
    with pytest.raises(ReplicaLost):
        await race.task
    assert (race.seat.asked, spare.settled, race.replicas.open) == (0, [], [])


async def test_without_a_second_replica_the_first_is_waited_for():
    race = Race(Seat(None))
    while not race.seat.asked:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)
    race.say("a")
    post, _ = await race.task
    assert (post.name, race.tally.hedged) == ("a", "")
    await race.running.__aexit__(None, None, None)


async def test_who_leaves_leaves_both():
    race = Race(Seat(spare := Spare()))
    await race.both_open()
    race.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await race.task
    assert (race.replicas.open, spare.settled) == ([], [False])


async def test_both_at_once_are_one_answer():
    race = Race(Seat(spare := Spare()))
    await race.both_open()
    race.say("a")
    race.say("b")
    post, _ = await race.task
    await race.running.__aexit__(None, None, None)
    assert (post.name, race.replicas.open, spare.settled) == ("a", [], [False])


class SilentStream(MemoryStream):
    async def __aiter__(self):
        await asyncio.Event().wait()
        yield []


class SilentReplica(MemoryReplica):
    """Takes requests, and never says anything."""

    @asynccontextmanager
    async def generate(self, request):
        async with super().generate(request):
            yield SilentStream(self, request)


async def test_engines_of_our_own_are_hedged_and_the_answer_is_billed_once():
    words = ids(" one two")
    answer = [[TokenDelta(0, words, cached_tokens=0)], [TokenDelta(0, [EOS], FinishReason.STOP)]]
    silent, quick = SilentReplica(), MemoryReplica(*answer)
    config = DispatchConfig(hedging=HedgingConfig(models=["m"], least_s=0.001, share=0.5))
    dispatcher = Dispatcher("m", [Endpoint("silent", silent), Endpoint("quick", quick)], config, SystemClock())
    dispatcher._hedging._seconds.extend([0.001] * 20)
    dispatcher._hedging._saved = 1.0
    desk = Desk()
    pipeline = Pipeline(
        Router(Catalog([ServedModel("m", quick, TOKENIZER)])),
        LocalFlowController({"m": dispatcher}, desk.admission, SystemClock()),
    )
    tally = RequestContext("req-1", 0.0)
    async with pipeline.generate(replace(ask("Hi", max_tokens=4), priority=10), tally) as parts:
        text = "".join([part.text async for batch in parts for part in batch])
        assert (silent.open, quick.open) == (0, 1), "the other one is left as soon as this one has begun"
    assert (text, tally.hedged) == (" one two", "second")
    (line,) = desk.ledger.events
    assert (line.output_tokens, line.prompt_tokens, line.replica) == (3, tally.prompt_tokens, "silent,quick")
    assert [len(silent.requests), len(quick.requests), silent.open, quick.open] == [1, 1, 0, 0]
    assert [station.credits.held for station in dispatcher.core.endpoint_states] == [0, 0]
    assert dispatcher.core.running == 0
