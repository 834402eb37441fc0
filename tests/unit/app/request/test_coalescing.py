"""Requests that ask the same share one answer, from the cache or while it is being made."""

import asyncio
import gc
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from maitred.app.models.router import Router
from maitred.app.request.answer_lookup import AnswerRecording
from maitred.app.request.answer_sharing import AnswerSharing
from maitred.app.request.coalescing import AnswerReader, CoalescedAnswer, CoalescedResponse, PeerLost
from maitred.app.request.engine_response import EngineResponse
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.request.pipeline import Pipeline
from maitred.app.request.response import ContinuableResponse
from maitred.cache.answer_cache import AnswerCache
from maitred.cache.answer_key import AnswerKey
from maitred.cache.backend import AnswerSelection, MemoryBackend, RemovedAnswersLog
from maitred.cache.config import CacheConfig
from maitred.core.context import CacheStatus, Outcome, RequestContext
from maitred.core.errors import NotCached, RateLimited, ReplicaLost
from maitred.core.inference import CacheControl, TextDelta
from maitred.core.request import ModelFingerprint, TokenDelta
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import Endpoint
from maitred.routing.catalog import Catalog, ServedModel
from tests.support.admission_services import ALICE, BOB, AdmissionSetup, StillClock, limit
from tests.unit.app.request.test_pipeline import (
    EOS,
    STOP,
    TOKENIZER,
    MemoryReplica,
    MemoryStream,
    ask,
    ids,
    text_of,
)

DIGEST = ModelFingerprint("shape", "tokenizer", "weights", "content")


class GatedReplica(MemoryReplica):
    """Sends a token of its answer whenever a test lets it."""

    def __init__(self, text="one two three"):
        super().__init__(*([TokenDelta(0, [token])] for token in ids(text)), [TokenDelta(0, [EOS], finish=STOP)])
        self.digest = DIGEST
        self.region = None
        self.gate = asyncio.Semaphore(0)
        self.prompt_tokens = self.output_tokens = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    def card(self):
        return replace(super().card(), digest=self.digest, region=self.region)

    @asynccontextmanager
    async def generate(self, request):
        async with super().generate(request):
            try:
                yield GatedStream(self, request)
            finally:
                await self.may_end.wait()

    def let(self, tokens=1000):
        for _ in range(tokens):
            self.gate.release()


class GatedStream(MemoryStream):
    on_unread = None

    async def __aiter__(self):
        for number, batch in enumerate(self.replica.batches):
            await self.replica.gate.acquire()
            self.replica.prompt_tokens += 0 if number else len(self.request.prompt)
            self.replica.output_tokens += sum(len(delta.tokens) for delta in batch)
            yield batch

    def listen(self, on_tokens):
        pass


class Gateway:
    def __init__(self, replica=None, config=None, limits=(), backend=None, peers=None, books=None, **admission):
        self.replica = replica or GatedReplica()
        self.admission = books or AdmissionSetup(*limits, **admission)
        self.clock = StillClock()
        self.backend = backend or MemoryBackend(1 << 20, self.clock)
        self.cache = AnswerCache(config or CacheConfig(), self.backend, self.clock)
        self.sharing = AnswerSharing(self.cache, peers)
        self.dispatcher = Dispatcher("m", [Endpoint("local", self.replica)], DispatchConfig(recoveries=0), self.clock)
        self.pipeline = Pipeline(
            Router(Catalog([ServedModel("m", [self.replica], TOKENIZER)])),
            LocalFlowController({"m": self.dispatcher}, self.admission.admission, self.clock),
            clock=self.clock,
            sharing=self.sharing,
        )

    async def ask(self, request=None, principal=ALICE, context=None, pace=None):
        """All parts of an answer; with a pace, a client that reads a batch whenever a test lets it."""
        context = context or RequestContext("req", 0.0, principal=principal)
        parts = []
        async with self.pipeline.generate(request or greedy(), context) as answer:
            async for batch in answer:
                parts += batch
                if pace is not None:
                    await pace.acquire()
        return parts, context

    def start(self, *args, **kwargs):
        return asyncio.create_task(self.ask(*args, **kwargs))

    @property
    def lines(self):
        return self.admission.ledger.events


def greedy(prompt="Hi", **fields):
    control = fields.pop("cache", CacheControl())
    return replace(ask(prompt, temperature=0.0, **fields), cache=control)


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_second_request_gets_the_answer_of_the_first():
    gateway = Gateway()
    gateway.replica.let()
    first, computed = await gateway.ask()
    second, cached = await gateway.ask()
    assert text_of(first) == text_of(second) == "one two three"
    assert [part.finish for part in second][-1] is STOP
    assert len(gateway.replica.requests) == 1
    assert (computed.cache.status, cached.cache.status) == (CacheStatus.MISS, CacheStatus.HIT)
    assert computed.cache.key == cached.cache.key
    assert cached.usage == computed.usage
    assert cached.finish_reasons == computed.finish_reasons == [STOP]
    assert cached.first_token_s is None, "nothing was computed for it"


@pytest.mark.usefixtures("uncollected")
async def test_nothing_of_an_answer_is_left_to_the_collector_of_cyclic_garbage():
    def kept():
        return {id(thing) for thing in gc.get_objects() if isinstance(thing, CoalescedAnswer | EngineResponse)}

    gateway, before = Gateway(), kept()
    asked = gateway.start(), gateway.start()
    await settle()
    assert kept() - before
    gateway.replica.let()
    await asyncio.gather(*asked)
    del asked
    await settle()
    assert not kept() - before


@pytest.mark.parametrize("whole", [True, False])
async def test_who_wants_the_whole_answer_is_not_woken_for_its_parts(whole, monkeypatch):
    wakes = []
    wake = CoalescedResponse._wake
    monkeypatch.setattr(CoalescedResponse, "_wake", lambda self: wakes.append(1) or wake(self))
    gateway = Gateway(GatedReplica("one two three four five six"))
    asked = gateway.start(replace(greedy(), whole=whole))
    for _ in range(20):
        gateway.replica.let(1)
        await settle()
    parts, _ = await asked
    assert text_of(parts) == "one two three four five six"
    assert (len(wakes) <= 4) == whole


async def test_a_hit_has_a_line_of_its_own_in_the_ledger_without_tokens():
    gateway = Gateway()
    gateway.replica.let()
    _, computed = await gateway.ask()
    await gateway.ask()
    first, second = gateway.lines
    assert (first.cache, first.prompt_tokens + first.output_tokens) == ("", computed.usage.total_tokens)
    assert (second.cache, second.saved_tokens) == ("exact", computed.usage.total_tokens)
    assert (second.prompt_tokens, second.output_tokens, second.cost_nusd) == (0, 0, 0)
    assert second.outcome is Outcome.FINISHED


@pytest.mark.parametrize(
    "other",
    [
        greedy("Ho"),
        greedy(max_tokens=19),
        greedy(top_p=0.5),
        greedy(seed=7),
        greedy(stops=("x",)),
        greedy(cache=CacheControl(namespace="mine")),
        greedy(cache=CacheControl(no_cache=True)),
    ],
)
async def test_another_request_is_computed(other):
    gateway = Gateway()
    gateway.replica.let()
    await gateway.ask()
    _, context = await gateway.ask(other)
    assert context.cache.status is CacheStatus.MISS
    assert len(gateway.replica.requests) == 2


async def test_answers_that_are_drawn_at_random_are_not_kept():
    gateway = Gateway()
    gateway.replica.let()
    for _ in range(2):
        _, context = await gateway.ask(ask("Hi"))
        assert context.cache is None
    assert len(gateway.replica.requests) == 2
    _, context = await gateway.ask(ask("Hi", seed=7))
    _, context = await gateway.ask(ask("Hi", seed=7))
    assert context.cache.status is CacheStatus.HIT


async def test_other_tenants_get_answers_of_their_own():
    gateway = Gateway()
    gateway.replica.let()
    other = replace(BOB, tenants=("other", "acme"))
    await gateway.ask(principal=ALICE)
    _, context = await gateway.ask(principal=BOB)
    assert context.cache.status is CacheStatus.HIT
    _, context = await gateway.ask(principal=other)
    assert context.cache.status is CacheStatus.MISS


@pytest.mark.parametrize(("scope", "hits"), [("key", 0), ("tenant", 1), ("organisation", 2), ("public", 3)])
async def test_the_scope_says_who_shares(scope, hits):
    gateway = Gateway(config=CacheConfig(scope=scope))
    gateway.replica.let()
    await gateway.ask(principal=ALICE)
    others = [BOB, replace(BOB, tenants=("other", "acme")), replace(BOB, tenants=("team", "rival"))]
    found = [(await gateway.ask(principal=other))[1].cache.status for other in others]
    assert found.count(CacheStatus.HIT) == hits


async def test_no_store_and_only_if_cached():
    gateway = Gateway()
    gateway.replica.let()
    with pytest.raises(NotCached):
        await gateway.ask(greedy(cache=CacheControl(only_if_cached=True)))
    await gateway.ask(greedy(cache=CacheControl(no_store=True)))
    with pytest.raises(NotCached):
        await gateway.ask(greedy(cache=CacheControl(only_if_cached=True)))
    await gateway.ask()
    _, context = await gateway.ask(greedy(cache=CacheControl(only_if_cached=True)))
    assert context.cache.status is CacheStatus.HIT


async def test_the_age_of_an_answer():
    gateway = Gateway(config=CacheConfig(ttl_s=60))
    gateway.replica.let()
    await gateway.ask()
    gateway.clock.now_s = 30.0
    _, context = await gateway.ask(greedy(cache=CacheControl(max_age_s=30.0)))
    assert (context.cache.status, context.cache.age_s) == (CacheStatus.HIT, 30.0)
    _, context = await gateway.ask(greedy(cache=CacheControl(max_age_s=29.0)))
    assert context.cache.status is CacheStatus.MISS, "it is computed anew, and replaces the old one"
    gateway.clock.now_s = 89.0
    assert (await gateway.ask())[1].cache.status is CacheStatus.HIT
    gateway.clock.now_s = 90.0
    assert (await gateway.ask())[1].cache.status is CacheStatus.MISS
    await gateway.ask(greedy(seed=3, cache=CacheControl(ttl_s=5.0)))
    gateway.clock.now_s = 95.0
    assert (await gateway.ask(greedy(seed=3)))[1].cache.status is CacheStatus.MISS


async def test_other_weights_under_the_same_name_find_nothing():
    gateway = Gateway()
    gateway.replica.let()
    await gateway.ask()
    for part in ("shape", "tokenizer", "weights", "content"):
        gateway.replica.digest = replace(DIGEST, **{part: "new"})
        assert (await gateway.ask())[1].cache.status is CacheStatus.MISS
    gateway.replica.digest = DIGEST
    assert (await gateway.ask())[1].cache.status is CacheStatus.HIT


async def test_an_answer_is_not_kept_for_weights_that_were_replaced_meanwhile():
    gateway = Gateway()
    running = gateway.start()
    await settle()
    gateway.replica.digest = replace(DIGEST, content="new")
    gateway.replica.let()
    await running
    gateway.replica.digest = DIGEST
    assert (await gateway.ask())[1].cache.status is CacheStatus.MISS


async def test_a_model_whose_weights_are_unknown_has_no_cache():
    gateway = Gateway()
    gateway.replica.digest = ModelFingerprint()
    gateway.replica.let()
    for _ in range(2):
        assert (await gateway.ask())[1].cache is None
    assert len(gateway.replica.requests) == 2


async def test_a_failed_answer_is_not_kept():
    gateway = Gateway()
    batches = gateway.replica.batches
    gateway.replica.batches = batches[:1]
    gateway.replica.let()
    with pytest.raises(ReplicaLost):
        await gateway.ask()
    gateway.replica.batches = batches
    parts, context = await gateway.ask()
    assert (text_of(parts), context.cache.status) == ("one two three", CacheStatus.MISS)


async def test_callers_who_ask_at_the_same_time_share_one_computation():
    gateway = Gateway()
    running = [gateway.start() for _ in range(5)]
    await settle()
    gateway.replica.let(2)
    await settle()
    running += [gateway.start() for _ in range(5)]
    await settle()
    gateway.replica.let()
    results = [await task for task in running]
    assert {text_of(parts) for parts, _ in results} == {"one two three"}
    assert [context.cache.status for _, context in results] == [CacheStatus.MISS] + [CacheStatus.COALESCED] * 9
    assert len({context.usage for _, context in results if context.usage.details is None}) == 1
    assert len(gateway.replica.requests) == 1
    assert gateway.replica.open == 0
    computed = [line for line in gateway.lines if not line.cache]
    assert len(computed) == 1
    assert len(gateway.lines) == 10
    assert sum(line.output_tokens for line in gateway.lines) == results[0][1].completion_tokens
    assert gateway.sharing.coalesced_count == 0


async def test_the_first_caller_leaves_and_the_others_go_on():
    gateway = Gateway()
    first, second = gateway.start(), gateway.start()
    await settle()
    gateway.replica.let(1)
    await settle()
    first.cancel()
    await settle()
    assert first.cancelled()
    assert gateway.replica.open == 1
    third = gateway.start()
    await settle()
    gateway.replica.let()
    for task in (second, third):
        parts, context = await task
        assert (text_of(parts), context.cache.status) == ("one two three", CacheStatus.COALESCED)
    assert len(gateway.replica.requests) == 1
    assert gateway.replica.open == 0
    assert sum(line.output_tokens for line in gateway.lines) == context.completion_tokens


async def test_the_last_one_out_ends_the_work():
    gateway = Gateway()
    running = [gateway.start() for _ in range(3)]
    await settle()
    gateway.replica.let(2)
    await settle()
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    assert gateway.replica.open == 0
    assert gateway.sharing.coalesced_count == 0
    (computed,) = (line for line in gateway.lines if not line.cache)
    assert computed.outcome is Outcome.CANCELLED
    gateway.replica.let()
    assert text_of((await gateway.ask())[0]) == "one two three"


async def test_a_failure_is_everybodys():
    gateway = Gateway()
    gateway.replica.batches = gateway.replica.batches[:2]
    running = [gateway.start() for _ in range(3)]
    await settle()
    gateway.replica.let()
    for task in running:
        with pytest.raises(ReplicaLost):
            await task
    assert gateway.replica.open == 0
    assert len(gateway.replica.requests) == 1


async def test_who_is_refused_has_got_nothing_from_the_cache():
    gateway = Gateway(limits=[limit("key:alice", "requests_per_minute", 1)])
    gateway.replica.let()
    await gateway.ask()
    context = RequestContext("req", 0.0, principal=ALICE)
    with pytest.raises(RateLimited):
        await gateway.ask(context=context)
    assert context.cache is None


async def test_what_refuses_the_first_caller_does_not_refuse_the_others():
    gateway = Gateway(limits=[limit("key:alice", "requests_per_minute", 1)])
    gateway.replica.let()
    await gateway.ask(greedy("Ho"))
    running = [gateway.start(), gateway.start(principal=BOB)]
    results = await asyncio.gather(*running, return_exceptions=True)
    assert type(results[0]).__name__ == "RateLimited"
    assert text_of(results[1][0]) == "one two three"
    assert results[1][1].cache.status is CacheStatus.MISS


async def test_the_line_of_a_caller_who_has_left_waits_for_no_response():
    gateway, awaited = Gateway(), []
    record = gateway.admission.ledger.record

    def note(event, response="", settle=None):
        awaited.append(response)
        return record(event, response, settle)

    gateway.admission.ledger.record = note
    contexts = [RequestContext(name, 0.0, principal=ALICE, stored_as=name) for name in ("first", "second")]
    first, second = (gateway.start(context=context) for context in contexts)
    await settle()
    gateway.replica.let(1)
    await settle()
    first.cancel()
    await settle()
    gateway.replica.let()
    await second
    assert sorted(awaited) == ["", "second"]
    await gateway.ask(greedy("Ho"), context=RequestContext("third", 0.0, principal=ALICE, stored_as="third"))
    assert awaited[-1] == "third"


async def test_the_first_caller_begins_another_answer_with_the_same_record():
    gateway, pace = Gateway(), asyncio.Semaphore(0)
    record = RequestContext("first", 0.0, principal=ALICE)
    gateway.replica.may_end.clear()
    running = [gateway.start(context=record)]
    await settle()
    running.append(gateway.start(pace=pace))
    gateway.replica.let(1)
    await settle()
    gateway.replica.let()
    await settle()
    usage = record.usage
    assert usage.completion_tokens > 3
    record.reset_for_next_answer()
    gateway.replica.may_end.set()
    pace.release()
    pace.release()
    await asyncio.wait(running)
    assert running[1].result()[1].usage == usage
    assert (await gateway.ask())[1].usage == usage, "the cache has it, too"
    assert [line.saved_tokens for line in gateway.lines if line.cache] == [usage.total_tokens] * 2


async def test_nobody_joins_an_answer_that_is_being_ended():
    gateway = Gateway()
    gateway.replica.may_end.clear()
    first = gateway.start()
    await settle()
    first.cancel()
    await settle()
    second = gateway.start()
    await settle()
    gateway.replica.let()
    gateway.replica.may_end.set()
    assert text_of((await second)[0]) == "one two three"
    await asyncio.wait([first])
    assert first.cancelled()
    assert len(gateway.replica.requests) == 2


async def test_nobody_joins_an_answer_that_has_failed():
    gateway = Gateway(limits=[limit("key:alice", "tokens_per_minute", 10_000)])
    may_settle = asyncio.Event()
    gateway.admission.counters.trouble = may_settle.wait
    batches, gateway.replica.batches = gateway.replica.batches, ()
    first = gateway.start()
    await settle()
    assert not first.done(), "its reservation is not settled yet"
    gateway.replica.batches = batches
    gateway.replica.let()
    second = gateway.start()
    await settle()
    may_settle.set()
    assert text_of((await second)[0]) == "one two three"
    with pytest.raises(ReplicaLost):
        await first


async def test_who_handles_a_failure_changes_it_for_nobody_else():
    gateway = Gateway()
    gateway.replica.batches = gateway.replica.batches[:2]
    running = [gateway.start() for _ in range(3)]
    await settle()
    gateway.replica.let()
    failures = await asyncio.gather(*running, return_exceptions=True)
    assert {type(failure) for failure in failures} == {ReplicaLost}
    assert len({id(failure) for failure in failures}) == 3
    assert {failure.message for failure in failures} == {ReplicaLost.default_message}


async def test_a_new_reader_lets_an_answer_go_on_that_waits_for_a_slow_one():
    answer = CoalescedAnswer(RequestContext("req", 0.0), AnswerRecording(1 << 20, None), 1)
    peer, slow = QuietReader(), QuietReader()
    slow.unread = 1000
    answer.attach(slow)
    answer.start(partial(endless, 1000), lambda _: None)
    await settle()
    before = slow.taken
    await settle()
    assert slow.taken == before < 1000
    answer.attach(peer)
    await settle()
    assert slow.taken > before
    await answer.detach(peer, None)
    await answer.detach(slow, None)


class QuietReader(AnswerReader):
    taken = 0

    def on_start(self):
        pass

    def take(self, parts):
        self.taken += len(parts)

    def on_end(self, failure):
        pass


async def endless(most, stack):
    async def stream():
        for _ in range(most):
            yield [TextDelta(0, "word")]
            await asyncio.sleep(0)

    return stream()


class OpenSink:
    open = True

    def __init__(self):
        self.parts = []

    def send(self, parts):
        self.parts += parts


async def test_who_leaves_has_a_line_with_the_tokens_that_were_pushed_to_it():
    gateway, follower = Gateway(), RequestContext("second", 0.0, principal=ALICE)
    first = gateway.start()
    await settle()

    async def read():
        async with gateway.pipeline.generate(greedy(), follower) as answer:
            await anext(answer)
            answer.push_to(sink)
            async for _ in answer:
                pass

    sink, second = OpenSink(), asyncio.create_task(read())
    await settle()
    for _ in range(3):
        gateway.replica.let(1)
        await settle()
    second.cancel()
    await settle()
    assert text_of(sink.parts), "something was pushed"
    (line,) = gateway.lines
    assert (line.cache, line.outcome) == ("coalesced", Outcome.CANCELLED)
    assert line.saved_tokens == follower.usage.total_tokens >= follower.prompt_tokens + 3
    gateway.replica.let()
    await first


class BrokenResponse(ContinuableResponse):
    """Breaks off; what it has written is told with the tokens in the record of its request."""

    def __init__(self, context):
        self.context = context

    async def __anext__(self):
        raise ReplicaLost

    def push_to(self, sink):
        pass

    @property
    def prefix(self):
        return self.context.completion_tokens


async def test_the_first_caller_goes_on_elsewhere_before_another_asks_how_far_the_answer_was():
    record = RequestContext("req", 0.0, completion_tokens=7)
    answer = CoalescedAnswer(record, AnswerRecording(1 << 20, None), 1)

    async def compute(stack):
        return BrokenResponse(record)

    first, second = (CoalescedResponse(answer, record, SimpleNamespace(choices=1), compute) for _ in range(2))
    answer.start(compute, lambda _: None)
    with pytest.raises(ReplicaLost):
        await anext(first)
    record.reset_for_fallback("general=big")
    assert first.prefix == second.prefix == 7
    assert record.completion_tokens == 0


async def test_who_has_failed_to_compute_an_answer_again_is_a_caller_like_any_other():
    """Its request may go on at another model, with a response that is stored."""
    first, next_one = RequestContext("first", 0.0), RequestContext("next", 0.0, stored_as="resp_1")
    answer = CoalescedAnswer(first, AnswerRecording(1 << 20, None), 1)
    answer.send([TextDelta(0, "one")])

    async def compute(stack):
        answer.next_context = next_one
        return BrokenResponse(next_one)

    reader, other = (
        CoalescedResponse(answer, context, SimpleNamespace(choices=1), compute) for context in (next_one, first)
    )
    answer.start(compute, lambda _: None)
    assert await anext(reader) == [TextDelta(0, "one")]
    with pytest.raises(ReplicaLost):
        await anext(reader)
    await answer.detach(reader, None)
    assert (next_one.stored_as, next_one.on_work_end) == ("resp_1", None)
    await answer.detach(other, None)


def slow_admissions(gateway, monkeypatch):
    """Lets those who share an answer be admitted only when an event says so, which is returned."""
    admitted, admit = asyncio.Event(), gateway.pipeline._flow_controller.admit

    async def slow_admit(pool, dispatch_request, admission_request, *others):
        result = await admit(pool, dispatch_request, admission_request, *others)
        if admission_request.cache:
            await admitted.wait()
        return result

    monkeypatch.setattr(gateway.pipeline._flow_controller, "admit", slow_admit)
    return admitted


async def join_what_is_lost(gateway):
    """Has Bob join Alice's answer, which is lost before he is admitted; returns his request."""
    first = gateway.start()
    await settle()
    (answer,) = gateway.sharing._coalesced.values()
    second = gateway.start(context=RequestContext("second", 0.0, principal=BOB), principal=BOB)
    await settle()
    answer._task.cancel(PeerLost())
    await settle()
    with pytest.raises(ReplicaLost):
        await first
    return second


async def test_who_joins_the_next_answer_when_the_first_is_lost_is_one_request_in_the_rates(monkeypatch):
    gateway = Gateway(limits=[limit("key:bob", "requests_per_minute", 10)])
    admitted = slow_admissions(gateway, monkeypatch)
    second = await join_what_is_lost(gateway)
    third = gateway.start()
    await settle()
    admitted.set()
    await settle()
    gateway.replica.let()
    _, context = await second
    await third
    assert context.cache.status is CacheStatus.COALESCED
    taken = [line.taken for line in gateway.lines if line.request_id == "second"]
    assert len(taken) == 2
    assert sum(sum(each.values()) for each in taken) == 1


async def test_an_answer_that_is_lost_while_another_caller_is_admitted_is_computed_for_that_one(monkeypatch):
    gateway = Gateway()
    admitted = slow_admissions(gateway, monkeypatch)
    second = await join_what_is_lost(gateway)
    admitted.set()
    gateway.replica.let()
    parts, context = await second
    assert (text_of(parts), context.cache.status) == ("one two three", CacheStatus.MISS)
    lines = [(line.cache, line.outcome) for line in gateway.lines if line.request_id == "second"]
    assert lines == [("coalesced", Outcome.FAILED), ("", Outcome.FINISHED)]
    assert not gateway.sharing.coalesced_count


SPLIT = CacheConfig(coalesced_bill="split")


async def share(gateway, *leavers):
    """Lines of three callers of an answer, the first one first, of whom some leave in the midst."""
    contexts = [RequestContext(name, 0.0, principal=who) for name, who in [("a", ALICE), ("b", BOB), ("c", ALICE)]]
    running = [gateway.start(principal=context.principal, context=context) for context in contexts]
    await settle()
    gateway.replica.let(2)
    await settle()
    for number in leavers:
        running[number].cancel()
    await settle()
    gateway.replica.let()
    await asyncio.wait(running)
    lines = sorted(gateway.lines, key=lambda line: not line.cache)
    assert sum(line.output_tokens for line in lines) == gateway.replica.output_tokens
    assert sum(line.prompt_tokens for line in lines) == gateway.replica.prompt_tokens
    assert not gateway.admission.admission.leases.active
    lines = [[line for line in gateway.lines if line.request_id == context.request_id] for context in contexts]
    for context, (line,) in zip(contexts, lines, strict=True):
        assert context.saved_tokens == line.saved_tokens
    return lines


async def test_a_bill_is_split_among_all_who_get_the_answer():
    gateway = Gateway(
        config=SPLIT, limits=[limit("key:bob", "usd_total", 1_000_000), limit("key:bob", "tokens_per_minute", 100)]
    )
    (first,), (second,), (third,) = await share(gateway)
    tokens = gateway.replica.output_tokens
    assert second.output_tokens == third.output_tokens == tokens // 3 > 0
    assert first.output_tokens == tokens - 2 * (tokens // 3)
    assert (first.cache, second.cache, third.cache) == ("", "coalesced", "coalesced")
    whole = gateway.replica.prompt_tokens + tokens
    assert second.prompt_tokens + second.output_tokens + second.saved_tokens == whole
    assert second.cost_nusd == second.prompt_tokens * 1000 + second.output_tokens * 2000
    assert second.charges == {next(iter(second.charges)): second.cost_nusd}
    assert [*second.taken.values()] == [second.prompt_tokens + second.output_tokens]
    assert [dict(amounts) for _, amounts in gateway.admission.counters.settled] == [{**second.charges, **second.taken}]


async def test_who_leaves_before_the_end_has_no_share_but_the_first_caller_has_one():
    gateway = Gateway(config=SPLIT)
    (first,), (second,), (third,) = await share(gateway, 0, 1)
    tokens = gateway.replica.output_tokens
    assert (second.output_tokens, second.cost_nusd, second.outcome) == (0, 0, Outcome.CANCELLED)
    assert second.saved_tokens > 0
    assert third.output_tokens == tokens // 2
    assert first.output_tokens == tokens - tokens // 2


async def test_when_all_leave_the_first_caller_pays():
    gateway = Gateway(config=SPLIT)
    (first,), (second,), (third,) = await share(gateway, 0, 1, 2)
    assert first.output_tokens == gateway.replica.output_tokens == 2
    assert second.output_tokens == third.output_tokens == 0


async def test_a_share_of_who_leaves_behind_the_end_stays_in_its_line():
    gateway, pace = Gateway(config=SPLIT), asyncio.Semaphore(0)
    slow_context = RequestContext("slow", 0.0, principal=BOB)
    running = gateway.start()
    await settle()
    slow = gateway.start(context=slow_context, principal=BOB, pace=pace)
    await settle()
    gateway.replica.let()
    await running
    slow.cancel()
    await asyncio.wait([slow])
    first, second = sorted(gateway.lines, key=lambda line: line.cache)
    assert first.output_tokens + second.output_tokens == gateway.replica.output_tokens
    assert second.output_tokens > 0
    assert not gateway.admission.admission.leases.active


class SlowBackend(MemoryBackend):
    """Keeps an answer when a test lets it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.may_store = asyncio.Event()

    def put(self, *args):
        return asyncio.ensure_future(self.may_store.wait())


async def test_who_comes_when_the_bill_is_divided_pays_as_for_a_hit():
    gateway = Gateway(config=SPLIT, price={"prompt": 1.0, "output": 2.0, "hit": 0.5})
    gateway.cache._backend = backend = SlowBackend(1 << 20, gateway.clock)
    running = gateway.start()
    await settle()
    gateway.replica.let()
    await running
    _, context = await gateway.ask(principal=BOB)
    assert context.cache.status is CacheStatus.COALESCED
    first, second = gateway.lines
    assert (first.output_tokens, second.output_tokens) == (gateway.replica.output_tokens, 0)
    assert second.saved_tokens == first.prompt_tokens + first.output_tokens
    assert (second.price, second.cost_nusd) == ("0.5 USD per million", second.saved_tokens * 500)
    backend.may_store.set()


async def test_who_cannot_pay_the_whole_answer_shares_none():
    """A share is smaller, but nobody knows how many stay to the end."""
    gateway = Gateway(config=SPLIT, limits=[limit("key:bob", "usd_total", 30_000)])
    contexts = [RequestContext("a", 0.0, principal=ALICE), RequestContext("b", 0.0, principal=BOB)]
    running = [gateway.start(principal=context.principal, context=context) for context in contexts]
    await settle()
    gateway.replica.let()
    await asyncio.wait(running)
    assert contexts[1].cache is None or contexts[1].cache.status is CacheStatus.MISS
    assert sum(line.output_tokens for line in gateway.lines) == gateway.replica.output_tokens


@pytest.mark.parametrize(
    ("selection", "status"),
    [
        (AnswerSelection(), CacheStatus.MISS),
        (AnswerSelection(tenant="team", model="m"), CacheStatus.MISS),
        (AnswerSelection(tenant="other"), CacheStatus.HIT),
    ],
)
async def test_an_answer_that_was_being_computed_while_such_were_removed_is_not_kept(selection, status):
    gateway = Gateway()
    running = gateway.start()
    await settle()
    gateway.clock.now_s = 5.0
    await gateway.backend.remove(selection)
    gateway.clock.now_s = 6.0
    gateway.replica.let()
    await running
    assert (await gateway.ask())[1].cache.status is status
    assert (await gateway.ask())[1].cache.status is CacheStatus.HIT, "an answer from after the removal is kept"


async def test_a_removal_that_is_not_known_any_more_counts_as_one_of_all():
    log = RemovedAnswersLog()
    key = AnswerKey(bytes(32), tenant="t", organisation="o", model="m")
    for second in range(300):
        log.add(AnswerSelection(tenant="other"), float(second))
    assert log.has_removed(key, 10.0)
    assert not log.has_removed(key, 100.0)
    log.add(AnswerSelection(tenant="t"), 300.0)
    assert log.has_removed(key, 300.0)
    assert not log.has_removed(key, 300.1)


@pytest.mark.parametrize("by_tenant", [True, False])
async def test_who_is_bound_to_regions_shares_only_with_those_who_are_bound_to_the_same(by_tenant):
    def start(*regions):
        if by_tenant:
            return gateway.start(greedy(), replace(ALICE, regions=frozenset(regions)))
        return gateway.start(replace(greedy(), regions=frozenset(regions)))

    gateway = Gateway()
    gateway.replica.region = "eu"
    asked = [gateway.start(), start("eu"), start("eu"), start("eu", "us")]
    await settle()
    assert gateway.sharing.coalesced_count == 3, "it may be computed elsewhere for the others"
    gateway.replica.let()
    assert [text_of(parts) for parts, _ in await asyncio.gather(*asked)] == ["one two three"] * 4
