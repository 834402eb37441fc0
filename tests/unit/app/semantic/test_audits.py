"""Audits: in their order, none given up, and what counts as the same answer."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from maitred.app.request.shadow_traffic import SHADOW
from maitred.app.semantic import audits
from maitred.app.semantic.audits import AuditedAnswer, AuditQueue, are_same
from maitred.core.errors import ReplicaLost, ReplicaUnavailable
from maitred.core.inference import TextDelta
from maitred.core.request import FinishReason, Usage
from tests.support.clock import FakeClock

STOP, LENGTH, CALLS = FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS
TEXT = "You can order a new card in the app, and it will come to your address within some days."


def answer(*texts, finish=STOP, **extra):
    deltas = [TextDelta(0, text) for text in texts]
    return [*deltas, TextDelta(0, "", finish=finish, extra=extra or None)]


class Copies:
    """Computes copies as it is told to: an answer, None where there is no room, or a failure."""

    def __init__(self, *results, tokens=0, dispatched=True):
        self.results = [*results]
        self.contexts = []
        self._tokens, self.is_dispatched = tokens, dispatched

    async def __call__(self, context):
        self.contexts.append(context)
        context.model = "a-model"
        context.set_usage(Usage(self._tokens, 0))  # as planned
        result = self.results.pop(0)
        if result is None:
            return None
        context.dispatched_s = 1.0 if self.is_dispatched else None
        if isinstance(result, BaseException):
            raise result
        return result


class Audited:
    """A queue, and what it has recorded."""

    def __init__(self, clock=None, tokens_per_hour=1000):
        self.clock = clock or FakeClock()
        self.queue = AuditQueue(self.clock, tokens_per_hour, 0.8)
        self.recorded = []

    def add(self, name, cached=None, own=None, copy=None, scope="a scope"):
        """Adds a look-up; returns the future of its own answer."""
        future = asyncio.get_running_loop().create_future()
        if own is not None:
            future.set_result(own)
        compared = None if cached is None else AuditedAnswer(cached, future, copy or Copies())
        self.queue.add(scope, lambda is_right: self.recorded.append((name, is_right)), compared)
        return future


@asynccontextmanager
async def audited(**settings):
    world = Audited(**settings)
    task = asyncio.create_task(world.queue.run())
    try:
        yield world
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(audits, "_RETRY_S", 0.0)


async def test_look_ups_are_recorded_in_their_order_whenever_their_answers_are_known():
    async with audited() as world:
        first = world.add("first", answer(TEXT))
        world.add("second")
        third = world.add("third", answer(TEXT))
        third.set_result(answer("No."))
        await settle()
        assert world.recorded == []
        first.set_result(answer(TEXT))
        await settle()
        assert world.recorded == [("first", True), ("second", True), ("third", False)]
        world.add("fourth")
        await settle()
        assert world.recorded[-1] == ("fourth", True)


async def test_an_answer_that_its_request_did_not_compute_is_computed_for_the_operators():
    copies = Copies(answer(TEXT), tokens=30)
    async with audited() as world:
        world.add("a", answer(TEXT), copy=copies).set_result(None)
        await settle()
    assert world.recorded == [("a", True)]
    (context,) = copies.contexts
    assert context.principal is SHADOW
    assert world.queue.tokens == {"a-model": 30}


async def test_an_audit_waits_for_capacity_as_long_as_it_takes():
    copies = Copies(*[None] * 50, answer("Something else."))
    async with audited() as world:
        world.add("a", answer(TEXT), copy=copies).set_result(None)
        world.add("b")
        while len(copies.results) > 1:
            assert world.recorded == []
            await asyncio.sleep(0)
        await settle()
    assert world.recorded == [("a", False), ("b", True)]


async def test_a_scope_does_not_wait_for_another_one():
    async with audited() as world:
        first = world.add("first", answer(TEXT), copy=Copies(*[None] * 10_000))
        world.add("second")
        world.add("other", answer(TEXT), own=answer(TEXT), scope="another scope")
        world.add("last", scope="another scope")
        first.set_result(None)
        await settle()
        assert world.recorded == [("other", True), ("last", True)]
        assert world.queue.count == 2


async def test_what_was_added_before_the_queue_runs_is_not_lost():
    world = Audited()
    world.add("a", answer(TEXT), own=answer(TEXT))
    task = asyncio.create_task(world.queue.run())
    await settle()
    task.cancel()
    assert world.recorded == [("a", True)]


async def test_a_look_up_that_ends_after_the_queue_breaks_no_request():
    async with audited() as world:
        await settle()
    world.add("a", answer(TEXT), own=answer(TEXT))
    await settle()
    assert world.recorded == []
    assert world.queue.count == 1


@pytest.mark.parametrize("failure", [ReplicaLost(), TimeoutError(), RuntimeError()])
async def test_three_failures_of_a_replica_count_as_a_wrong_answer(failure):
    copies = Copies(failure, failure, failure, answer(TEXT), tokens=7)
    async with audited() as world:
        world.add("a", answer(TEXT), copy=copies).set_result(None)
        await settle()
    assert world.recorded == [("a", False)]
    assert len(copies.results) == 1
    assert world.queue.tokens == {"a-model": 21}, "what failed was computed, too"


async def test_two_failures_are_none():
    copies = Copies(ReplicaLost(), None, ReplicaLost(), None, answer(TEXT))
    async with audited() as world:
        world.add("a", answer(TEXT), copy=copies).set_result(None)
        await settle()
    assert world.recorded == [("a", True)]


async def test_what_never_reached_a_replica_is_no_failure():
    copies = Copies(*[ReplicaUnavailable(), None] * 50, tokens=7, dispatched=False)
    async with audited() as world:
        world.add("a", answer(TEXT), copy=copies).set_result(None)
        for _ in range(5):
            await settle()
        assert len(copies.results) < 50
        assert world.recorded == []
        assert not world.queue.tokens.total(), "nothing was computed"
        copies.results, copies.is_dispatched = [answer(TEXT)], True
        await settle()
    assert world.recorded == [("a", True)]
    assert world.queue.tokens.total() == 7


async def test_tokens_are_taken_from_what_an_hour_has_and_come_back():
    async with audited(tokens_per_hour=100) as world:
        queue = world.queue
        assert queue.has_tokens()
        await queue.compute(Copies(answer(TEXT), tokens=60))
        assert queue.has_tokens(), "what is left need not be enough"
        await queue.compute(Copies(answer(TEXT), tokens=60))
        assert not queue.has_tokens()
        world.clock.now_s += 0.19 * 3600
        assert not queue.has_tokens()
        world.clock.now_s += 0.02 * 3600
        assert queue.has_tokens()
        world.clock.now_s += 100 * 3600
        assert queue.has_tokens()
        await queue.compute(Copies(answer(TEXT), tokens=100))
        assert not queue.has_tokens(), "no more than an hour's is saved"


async def test_without_tokens_nothing_is_audited():
    assert not Audited(tokens_per_hour=0).queue.has_tokens()


async def test_a_scope_whose_audits_wait_leaves_places_to_others(monkeypatch):
    monkeypatch.setattr(audits, "_MOST_WAITING", 8)
    monkeypatch.setattr(audits, "_MOST_OF_SCOPE", 6)
    async with audited() as world:
        taken = {}
        for scope in ("a", "b", "c", "d"):
            taken[scope] = []
            while world.queue.has_capacity(scope):
                taken[scope].append(world.add(scope, answer(TEXT), scope=scope))
        assert [len(waiting) for waiting in taken.values()] == [4, 2, 1, 1]
        for own in taken["a"]:
            own.set_result(answer(TEXT))
        await settle()
        assert world.queue.has_capacity("a")
        assert world.queue.has_capacity("d")


async def test_a_scope_alone_has_a_bound_of_its_own(monkeypatch):
    monkeypatch.setattr(audits, "_MOST_OF_SCOPE", 3)
    async with audited() as world:
        own = world.add("a", answer(TEXT))
        world.add("b")
        assert world.queue.has_capacity("a scope")
        world.add("c")
        assert not world.queue.has_capacity("a scope")
        assert world.queue.has_capacity("another")
        own.set_result(answer(TEXT))
        await settle()
        assert world.queue.has_capacity("a scope")


async def test_settings_hold_for_later_comparisons():
    other = f"{TEXT} Please look."
    async with audited() as world:
        world.add("a", answer(TEXT), own=answer(other))
        await settle()
        world.queue.reconfigure(1000, 1.0)
        world.add("b", answer(TEXT), own=answer(other))
        await settle()
    assert world.recorded == [("a", True), ("b", False)]


def calling(text="", name="pay", arguments='{"amount": 5, "to": "Ann"}'):
    calls = [{"index": 0, "id": "x", "function": {"name": name, "arguments": arguments}}]
    return answer(text, finish=CALLS, tool_calls=calls)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (answer(TEXT), answer(TEXT[:10], TEXT[10:]), True),
        (answer(TEXT), answer(TEXT.upper().replace(",", " ;")), True),
        (answer(TEXT), answer(TEXT.replace("order", "request")), True),
        (answer(TEXT), answer(TEXT, finish=LENGTH), False),
        (answer(TEXT), answer(TEXT.replace("will come", "will not come")), False),
        (answer(TEXT), answer(TEXT.replace("some days", "3 days")), False),
        (answer(TEXT), answer(TEXT.replace("some days", "a week on Monday")), False),
        (answer(TEXT), answer(TEXT.replace("the app", "the Revolut app")), False),
        (answer(TEXT), answer(TEXT.replace("the app", "`settings.py`")), False),
        (answer(TEXT), answer("Please ask somebody in one of our branches."), False),
        (answer(""), answer(""), True),
        (calling(), calling(arguments='{"to":"Ann","amount":5}'), True),
        (calling(), calling(arguments='{"amount": 6, "to": "Ann"}'), False),
        (calling(), calling(name="owe"), False),
        (calling(TEXT), calling(TEXT.replace("order", "request")), False),
        (calling(TEXT), answer(TEXT, finish=CALLS), False),
    ],
)
def test_same_answers(first, second, same):
    assert are_same(first, second, 0.8) is same
    assert are_same(second, first, 0.8) is same
