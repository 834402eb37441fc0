"""The beginning of an answer by whichever of two replicas is the first, with scripted replicas."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from maitred.app.models.router import Router
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.request.pipeline import Pipeline
from maitred.app.request.response import ReplicaAttempt, open_hedged
from maitred.core.clock import SystemClock
from maitred.core.context import RequestContext
from maitred.core.errors import ReplicaLost, ReplicaUnavailable
from maitred.core.request import FinishReason, TokenDelta
from maitred.core.timeline import RequestTimeline
from maitred.dispatch.config import DispatchConfig, HedgingConfig
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import Endpoint
from maitred.routing.catalog import Catalog, ServedModel
from tests.support.admission_services import AdmissionSetup
from tests.unit.app.request.test_pipeline import EOS, TOKENIZER, MemoryReplica, MemoryStream, ask, ids


class SecondReplica:
    def __init__(self):
        self.endpoint = SimpleNamespace(name="b")
        self.settled = []

    def on_submitted(self):
        pass

    def settle(self, *, won):
        self.settled.append(won)


class ScriptedEntry:
    """Entry that is late at once."""

    def __init__(self, second, after_s=0.0):
        self.given, self.after_s = second, after_s
        self.asked = 0

    def start_hedge_timer(self):
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
    async def at(self, name):
        self.open.append(name)
        try:
            yield self._items(name)
        finally:
            self.open.remove(name)
            self.ended.append(name)

    async def _items(self, name):
        yield await asyncio.shield(self.answers[name])
        yield "more"


class ScriptedAttempt(ReplicaAttempt):
    """An attempt at one of the two."""

    def __init__(self, replicas, name, on_submitted):
        super().__init__(RequestTimeline(), SystemClock(), {"replica": name})
        self.replicas, self.name, self.on_submitted = replicas, name, on_submitted

    async def _submit(self):
        self._items = await self._stack.enter_async_context(self.replicas.at(self.name))
        self.on_submitted()


class Race:
    """One in a task."""

    def __init__(self, entry):
        self.entry, self.replicas, self.context = entry, Replicas(), RequestContext("req-1", 0.0)
        self.task = asyncio.create_task(
            open_hedged(entry, SimpleNamespace(name="a"), self.new_attempt, entry.after_s, self.context)
        )

    def new_attempt(self, endpoint, on_submitted):
        return ScriptedAttempt(self.replicas, endpoint.name, on_submitted)

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
    race = Race(ScriptedEntry(second := SecondReplica()))
    await race.both_open()
    race.say(winner)
    endpoint, answer = await race.task
    assert endpoint.name == winner
    assert (race.replicas.open, race.replicas.ended) == ([winner], [loser])
    assert (second.settled, race.context.hedged) == ([winner == "b"], hedged)
    assert [item async for item in answer] == [f"from {winner}", "more"], "what was waited for is not lost"
    await answer.__aexit__(None, None, None)
    assert race.replicas.open == []


@pytest.mark.parametrize("fails", ["a", "b"])
async def test_one_that_fails_leaves_it_to_the_other(fails):
    race = Race(ScriptedEntry(second := SecondReplica()))
    await race.both_open()
    race.say(fails, ReplicaLost())
    other = "b" if fails == "a" else "a"
    await asyncio.sleep(0)
    race.say(other)
    endpoint, answer = await race.task
    assert (endpoint.name, second.settled) == (other, [other == "b"])
    await answer.__aexit__(None, None, None)
    assert race.replicas.open == []


async def test_where_both_fail_the_failure_of_the_first_is_raised():
    race = Race(ScriptedEntry(second := SecondReplica()))
    await race.both_open()
    race.say("b", ReplicaUnavailable())
    race.say("a", ReplicaLost())
    with pytest.raises(ReplicaLost):
        await race.task
    assert (race.replicas.open, second.settled) == ([], [False])


async def test_one_that_fails_before_it_is_late_is_followed_by_nobody():
    race = Race(ScriptedEntry(second := SecondReplica(), after_s=60.0))
    race.say("a", ReplicaLost())
    with pytest.raises(ReplicaLost):
        await race.task
    assert (race.entry.asked, second.settled, race.replicas.open) == (0, [], [])


async def test_without_a_second_replica_the_first_is_waited_for():
    race = Race(ScriptedEntry(None))
    while not race.entry.asked:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)
    race.say("a")
    endpoint, answer = await race.task
    assert (endpoint.name, race.context.hedged) == ("a", "")
    await answer.__aexit__(None, None, None)


async def test_who_leaves_leaves_both():
    race = Race(ScriptedEntry(second := SecondReplica()))
    await race.both_open()
    race.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await race.task
    assert (race.replicas.open, second.settled) == ([], [False])


async def test_both_at_once_are_one_answer():
    race = Race(ScriptedEntry(second := SecondReplica()))
    await race.both_open()
    race.say("a")
    race.say("b")
    endpoint, answer = await race.task
    await answer.__aexit__(None, None, None)
    assert (endpoint.name, race.replicas.open, second.settled) == ("a", [], [False])


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
    dispatcher.hedging._ttft_samples_s.extend([0.001] * 20)
    dispatcher.hedging._budget = 1.0
    services = AdmissionSetup()
    pipeline = Pipeline(
        Router(Catalog([ServedModel("m", [quick], TOKENIZER)])),
        LocalFlowController({"m": dispatcher}, services.admission, SystemClock()),
    )
    context = RequestContext("req-1", 0.0)
    async with pipeline.generate(replace(ask("Hi", max_tokens=4), priority=10), context) as parts:
        text = "".join([part.text async for batch in parts for part in batch])
        assert (silent.open, quick.open) == (0, 1), "the other one is left as soon as this one has begun"
    assert (text, context.hedged) == (" one two", "second")
    (line,) = services.ledger.events
    assert (line.output_tokens, line.prompt_tokens, line.replica) == (3, context.prompt_tokens, "silent,quick")
    assert [len(silent.requests), len(quick.requests), silent.open, quick.open] == [1, 1, 0, 0]
    assert [state.credits.request_count for state in dispatcher.core.endpoint_states] == [0, 0]
    assert dispatcher.core.running == 0
