"""Inputs of embeddings requests in the cache: what is known is not computed, and nothing else is different."""

import asyncio
import hashlib
import struct
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from maitred.app.models.router import Router
from maitred.app.request.embeddings import MAX_CHUNK_TEXTS, Embedder
from maitred.cache.answer_cache import AnswerCache
from maitred.cache.backend import AnswerSelection, MemoryBackend
from maitred.cache.config import CacheConfig, CacheRule
from maitred.cache.embedding_cache import EmbeddingCache, PendingEmbedding
from maitred.config.tree import BUNDLED_MODEL
from maitred.core.context import CacheStatus, Outcome, RequestContext
from maitred.core.errors import Forbidden, NotCached, QuotaExceeded, RateLimited, ReplicaLost
from maitred.core.inference import CacheControl, InferenceRequest
from maitred.core.replica import LoadReport, ModelCard
from maitred.core.request import FinishReason, ModelFingerprint, SamplingParams, TokenDelta
from maitred.core.tenancy import Principal, Scope
from maitred.core.usage import NANO
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import Endpoint
from maitred.routing.catalog import Catalog, ServedModel
from maitred.text.tokenizer import Tokenizer
from tests.support.admission_services import ALICE, BOB, AdmissionSetup, limit

TOKENIZER = Tokenizer.load(BUNDLED_MODEL)
DIMENSIONS = 8
CARD = ModelCard(
    name="m",
    context_tokens=64,
    vocab_size=1000,
    eos_token_ids=(),
    max_sequences=64,
    kv_capacity_tokens=1024,
    max_choices=1,
    dtype="fp32",
    device="cpu",
    embedding_dimensions=DIMENSIONS,
    digest=ModelFingerprint("shape", "tokenizer", "weights", "content"),
    pooling="mean, normalised",
)


def vector_of(text, card=CARD):
    """What the encoder computes: another vector for each text and each model."""
    digest = hashlib.sha256(repr((text, card.digest, card.dtype, card.pooling)).encode()).digest()
    return struct.pack(f"<{DIMENSIONS}f", *(byte / 256 for byte in digest[:DIMENSIONS]))


class MemoryEncoder:
    """Replica that computes vectors at once, but for texts that `refuses` is about.

    Attributes:
        computed: Texts that were computed, in order.
    """

    weight = 1.0

    def __init__(self, card=CARD, refuses=lambda text: False):
        self.model_card = card
        self.refuses = refuses
        self.computed = []

    @property
    def tokens(self):
        return sum(map(len, self.computed))

    def card(self):
        return self.model_card

    def load(self):
        return LoadReport()

    def count_unreported(self):
        return 0

    def on_change(self, listener):
        pass

    @asynccontextmanager
    async def generate(self, request):
        yield self._stream(request.prompt)

    async def _stream(self, text):
        if self.refuses(text):
            return  # the replica is lost
        self.computed.append(text)
        yield [TokenDelta(0, [], FinishReason.STOP, embedding=vector_of(text, self.model_card))]


class EmbedderSetup:
    """An embedder with everything behind it; `embed` asks it."""

    def __init__(self, *limits, encoder=None, cache=None, price=None, **admission):
        self.encoder = encoder or MemoryEncoder()
        self.services = AdmissionSetup(*limits, price=price, **admission)
        self.clock = self.services.clock
        config = CacheConfig() if cache is None else cache
        self.backend = MemoryBackend(config.max_bytes, self.clock)
        self.answers = AnswerCache(config, self.backend, self.clock)
        model = ServedModel("m", [self.encoder], TOKENIZER)
        dispatcher = Dispatcher("m", [Endpoint("local", self.encoder)], DispatchConfig(recoveries=0), self.clock)
        self.embedder = Embedder(
            Router(Catalog([model])),
            {"m": dispatcher},
            self.services.admission,
            self.clock,
            EmbeddingCache(self.answers, self.backend),
        )

    @property
    def events(self):
        """What the ledger has."""
        return self.services.ledger.events

    async def embed(self, *texts, dimensions=None, principal=ALICE, **fields):
        """Returns the vectors of texts, given as token ids, and the context of the request."""
        context = RequestContext("req", self.clock.monotonic_s(), route="/v1/embeddings", principal=principal)
        request = InferenceRequest("m", [*texts], SamplingParams(0, 0), prompt_param="input", **fields)
        vectors = await self.embedder.embed(request, context, dimensions)
        return [*vectors], context


A, B, C, D = [1], [2, 2], [3, 3, 3], [4, 4, 4, 4]
CAROL = Principal(key="carol", tenants=("others", "acme"), scopes=frozenset({Scope.INFERENCE}))
DAVE = Principal(key="dave", tenants=("team", "elsewhere"), scopes=frozenset({Scope.INFERENCE}))


def tokens_of(event):
    return event.cache, event.prompt_tokens, event.saved_tokens


async def test_only_unknown_inputs_are_computed_and_all_come_in_their_order():
    setup = EmbedderSetup()
    _, context = await setup.embed(B, D)
    assert context.cache.status is CacheStatus.MISS
    setup.encoder.computed.clear()
    vectors, context = await setup.embed(A, B, C, D)
    assert vectors == [vector_of(text) for text in (A, B, C, D)]
    assert setup.encoder.computed == [A, C]
    assert (context.cache.status, context.cache.key) == (CacheStatus.PARTIAL, "")
    assert context.prompt_tokens == 10, "usage counts what was asked"
    assert [tokens_of(event) for event in setup.events] == [("", 6, 0), ("partial", 4, 6)]


async def test_a_request_of_known_inputs_waits_in_no_queue():
    setup = EmbedderSetup()
    await setup.embed(A, B)
    setup.clock.now_s += 5
    await setup.embed(C)
    setup.clock.now_s += 5
    vectors, context = await setup.embed(C, B)
    assert vectors == [vector_of(C), vector_of(B)]
    assert (context.cache.status, context.cache.age_s) == (CacheStatus.HIT, 10), "it is as old as its oldest part"
    assert (context.predicted_position, context.dispatched_s, context.first_token_s) == (None, None, None)
    event = setup.events[-1]
    assert (tokens_of(event), event.replica, event.outcome) == (("exact", 0, 5), "", Outcome.FINISHED)
    assert context.prompt_tokens == 5


async def test_one_input_has_a_name_in_the_cache():
    setup = EmbedderSetup()
    _, first = await setup.embed(A)
    _, second = await setup.embed(A)
    assert first.cache.key == second.cache.key != ""
    (kept,) = await setup.backend.describe()
    assert (kept.tenant, kept.model, kept.answers) == ("team", "m", 1)


async def test_equal_inputs_of_a_request_are_computed_once():
    setup = EmbedderSetup()
    vectors, context = await setup.embed(A, D, A, A, D)
    assert vectors == [vector_of(text) for text in (A, D, A, A, D)]
    assert setup.encoder.computed == [A, D]
    assert context.cache.status is CacheStatus.PARTIAL
    assert tokens_of(setup.events[0]) == ("partial", 5, 6)


async def test_without_the_cache_every_input_is_computed():
    setup = EmbedderSetup(cache=CacheConfig(rules=(CacheRule(routes=("/v1/embeddings",), mode="off"),)))
    for _ in range(2):
        _, context = await setup.embed(A, A)
        assert context.cache is None
    assert setup.encoder.computed == [A] * 4
    assert [tokens_of(event) for event in setup.events] == [("", 2, 0)] * 2


async def test_shorter_vectors_are_cut_from_the_kept_ones():
    known, unknown = EmbedderSetup(), EmbedderSetup()
    await known.embed(A, B)
    for dimensions in (1, 3, 8):
        cut, context = await known.embed(A, B, dimensions=dimensions)
        assert context.cache.status is CacheStatus.HIT
        computed, _ = await unknown.embed(A, B, dimensions=dimensions, cache=CacheControl(no_cache=True))
        assert cut == computed
        assert all(len(vector) == 4 * dimensions for vector in cut)


@pytest.mark.parametrize(
    "change",
    [
        {"digest": ModelFingerprint("shape", "tokenizer", "weights", "other content")},
        {"digest": ModelFingerprint("other shape", "tokenizer", "weights", "content")},
        {"dtype": "bf16"},
        {"pooling": "cls, normalised"},
    ],
)
async def test_another_model_under_the_same_name_finds_nothing(change):
    setup = EmbedderSetup()
    await setup.embed(A)
    setup.encoder.model_card = replace(CARD, **change)
    vectors, context = await setup.embed(A)
    assert context.cache.status is CacheStatus.MISS
    assert vectors == [vector_of(A, setup.encoder.model_card)] != [vector_of(A)]


async def test_more_replicas_of_the_same_model_find_what_one_has_computed():
    setup = EmbedderSetup()
    await setup.embed(A)
    setup.encoder.model_card = replace(CARD, kv_capacity_tokens=2048, max_sequences=128)
    assert (await setup.embed(A))[1].cache.status is CacheStatus.HIT


async def test_vectors_of_unknown_weights_are_not_kept():
    setup = EmbedderSetup(
        encoder=MemoryEncoder(replace(CARD, digest=ModelFingerprint("shape", "tokenizer", "weights")))
    )
    await setup.embed(A)
    _, context = await setup.embed(A)
    assert (context.cache, setup.encoder.computed) == (None, [A, A])
    _, context = await setup.embed(A, cache=CacheControl(no_store=True))
    assert context.cache.status is CacheStatus.BYPASS, "who asks about the cache is told"
    assert not await setup.backend.describe()


async def test_a_model_that_changes_meanwhile_leaves_nothing_behind():
    def change(_):
        setup.encoder.model_card = replace(CARD, digest=ModelFingerprint("a", "b", "c", "d"))
        return False

    setup = EmbedderSetup(encoder=MemoryEncoder(refuses=change))
    await setup.embed(A)
    assert not await setup.backend.describe()


@pytest.mark.parametrize(
    ("scope", "sharing"),
    [("key", {ALICE}), ("tenant", {ALICE, BOB}), ("organisation", {ALICE, BOB, CAROL}), ("public", {BOB, CAROL, DAVE})],
)
async def test_who_shares_vectors_is_a_setting(scope, sharing):
    for caller in (ALICE, BOB, CAROL, DAVE):
        setup = EmbedderSetup(cache=CacheConfig(scope=scope))
        await setup.embed(A, principal=ALICE)
        _, context = await setup.embed(A, principal=caller)
        assert (context.cache.status is CacheStatus.HIT) is (caller in {ALICE, *sharing})


async def test_the_epoch_separates_vectors():
    setup = EmbedderSetup()
    await setup.embed(A)
    setup.answers.reconfigure(CacheConfig(epoch="2"))
    assert (await setup.embed(A))[1].cache.status is CacheStatus.MISS


async def test_callers_say_whether_they_take_and_leave_vectors():
    setup = EmbedderSetup()
    await setup.embed(A, cache=CacheControl(no_store=True))
    assert (await setup.embed(A))[1].cache.status is CacheStatus.MISS
    assert (await setup.embed(A, cache=CacheControl(namespace="mine")))[1].cache.status is CacheStatus.MISS
    assert (await setup.embed(A, cache=CacheControl(no_cache=True)))[1].cache.status is CacheStatus.MISS
    assert setup.encoder.computed == [A] * 4
    setup.clock.now_s += 10
    assert (await setup.embed(A, cache=CacheControl(max_age_s=5)))[1].cache.status is CacheStatus.MISS
    assert (await setup.embed(A, cache=CacheControl(max_age_s=5)))[1].cache.status is CacheStatus.HIT
    await setup.embed(B, cache=CacheControl(ttl_s=1))
    setup.clock.now_s += 2
    assert (await setup.embed(B))[1].cache.status is CacheStatus.MISS


async def test_a_caller_can_take_only_what_is_known():
    setup = EmbedderSetup()
    await setup.embed(A)
    only = CacheControl(only_if_cached=True)
    assert (await setup.embed(A, A, cache=only))[0] == [vector_of(A)] * 2
    with pytest.raises(NotCached):
        await setup.embed(A, B, cache=only)
    assert setup.encoder.computed == [A]
    setup.answers.reconfigure(CacheConfig(mode="off"))
    with pytest.raises(NotCached):
        await setup.embed(A, cache=only)


async def test_a_control_can_be_forbidden():
    setup = EmbedderSetup(cache=CacheConfig(controls=("no-store",)))
    await setup.embed(A, cache=CacheControl(no_store=True))
    with pytest.raises(Forbidden, match="no-cache"):
        await setup.embed(A, cache=CacheControl(no_cache=True))


async def test_a_failed_request_leaves_what_it_has_computed():
    texts = [[number] for number in range(MAX_CHUNK_TEXTS + 5)]
    setup = EmbedderSetup(encoder=MemoryEncoder(refuses=lambda text: text == texts[-1] and refused.pop()))
    refused = [True]
    with pytest.raises(ReplicaLost):
        await setup.embed(*texts)
    assert (tokens_of(setup.events[0]), setup.events[0].outcome) == (("", len(texts), 0), Outcome.FAILED)
    refused.append(False)
    vectors, _ = await setup.embed(*texts)
    assert vectors == [vector_of(text) for text in texts]
    assert tokens_of(setup.events[1]) == ("partial", 5, MAX_CHUNK_TEXTS)


async def test_an_entry_that_is_too_large_is_not_kept():
    setup = EmbedderSetup(cache=CacheConfig(max_answer_bytes=40))
    await setup.embed(A)
    assert not await setup.backend.describe()


@pytest.mark.parametrize(("counted", "left"), [("requests", 97), ("all", 91), ("none", 97)])
async def test_rates_of_tokens_count_known_inputs_as_configured(counted, left):
    setup = EmbedderSetup(limit("key:alice", "tokens_per_minute", 100), cached_answers=counted)
    await setup.embed(A, B, principal=BOB)
    _, context = await setup.embed(A, B, A, B, C)
    assert context.rate_limits.tokens.remaining == left
    setup.clock.now_s += 60
    _, context = await setup.embed(A, B, C)
    status = None if context.rate_limits is None else context.rate_limits.tokens
    assert (status is None) is (counted != "all")


async def test_known_inputs_are_not_refused_by_a_rate_of_tokens():
    setup = EmbedderSetup(limit("key:alice", "tokens_per_minute", 4))
    await setup.embed(A, B, principal=BOB)
    await setup.embed(A, B, C)
    await setup.embed(A, B, C)
    with pytest.raises(RateLimited):
        await setup.embed(A, B, D)


@pytest.mark.parametrize(("counted", "budgeted"), [("requests", 3.2), ("all", 3.2), ("none", 3.0)])
async def test_known_inputs_have_their_own_price(counted, budgeted):
    """Prices are a dollar and a tenth of it for a token."""
    budget = limit("key:alice", "usd_total", 6 * NANO)
    setup = EmbedderSetup(budget, price={"prompt": 1_000_000, "hit": 100_000}, cached_answers=counted)
    await setup.embed(B, principal=BOB)
    await setup.embed(B, C)
    assert setup.events[-1].cost_nusd == 3.2 * NANO
    assert [*setup.events[-1].charges.values()] == [budgeted * NANO]
    assert setup.events[-1].price == "1e+06/1e+06/0 USD per million, hits 100000 USD per million"
    with pytest.raises(QuotaExceeded):
        await setup.embed(B, D)
    await setup.embed(B, C)
    assert (setup.events[-1].cost_nusd, setup.events[-1].price) == (0.5 * NANO, "100000 USD per million")


class GatedEncoder(MemoryEncoder):
    """Computes nothing before a test lets it, and then not within one turn."""

    def __init__(self, **fields):
        super().__init__(**fields)
        self.may_compute = asyncio.Event()

    async def _stream(self, text):
        await self.may_compute.wait()
        await turn()
        async for batch in super()._stream(text):
            yield batch


async def turn():
    for _ in range(30):
        await asyncio.sleep(0)


async def test_inputs_that_are_being_computed_for_another_request_are_waited_for():
    setup = EmbedderSetup(encoder=GatedEncoder())
    running = [asyncio.create_task(setup.embed(*texts)) for texts in [(A, B), (B, C), (B,), (A, B)]]
    await turn()
    assert len(setup.embedder._cache.computing) == 2
    setup.encoder.may_compute.set()
    results = [await task for task in running]
    assert [vectors for vectors, _ in results] == [
        [vector_of(text) for text in texts] for texts in [(A, B), (B, C), (B,), (A, B)]
    ]
    assert sorted(setup.encoder.computed) == [A, B, C]
    assert sum(event.prompt_tokens for event in setup.events) == setup.encoder.tokens
    statuses = [context.cache.status for _, context in results]
    assert statuses == [CacheStatus.MISS, CacheStatus.PARTIAL, CacheStatus.HIT, CacheStatus.HIT]
    assert not setup.embedder._cache.computing


@pytest.mark.parametrize("fails", [False, True])
async def test_when_the_first_request_ends_without_vectors_one_of_the_others_computes_them(fails):
    setup = EmbedderSetup(encoder=GatedEncoder())
    first, *others = [asyncio.create_task(setup.embed(A, B)) for _ in range(3)]
    await turn()
    if fails:
        refusals = [True]
        setup.encoder.refuses = lambda text: bool(refusals and refusals.pop())
        setup.encoder.may_compute.set()
    else:
        first.cancel()
        await turn()
        setup.encoder.may_compute.set()
    results = [await task for task in others]
    assert all(vectors == [vector_of(A), vector_of(B)] for vectors, _ in results)
    assert sum(event.outcome is Outcome.FINISHED and event.prompt_tokens for event in setup.events) == len(A + B)
    await asyncio.wait([first])
    assert not setup.embedder._cache.computing


@pytest.mark.parametrize(
    ("fields", "computed"),
    [
        ({"cache": CacheControl(no_cache=True)}, 2),
        ({"cache": CacheControl(no_store=True)}, 1),
        ({"deadline_in_s": 1000.0}, 2),
        ({"priority": 10}, 2),
        ({"priority": 1}, 1),
        ({}, 1),
    ],
)
async def test_who_may_not_wait_computes_its_own(fields, computed):
    setup = EmbedderSetup(encoder=GatedEncoder())
    running = [asyncio.create_task(setup.embed(A))]
    await turn()
    running.append(asyncio.create_task(setup.embed(A, **fields)))
    await turn()
    setup.encoder.may_compute.set()
    for task in running:
        assert (await task)[0] == [vector_of(A)]
    assert len(setup.encoder.computed) == computed
    assert not setup.embedder._cache.computing


@pytest.mark.parametrize(("tenant", "status"), [("team", CacheStatus.MISS), ("others", CacheStatus.HIT)])
async def test_vectors_that_were_being_computed_while_such_were_removed_are_not_kept(tenant, status):
    setup = EmbedderSetup(encoder=GatedEncoder())
    running = asyncio.create_task(setup.embed(A))
    await turn()
    await setup.backend.remove(AnswerSelection(tenant=tenant))
    setup.encoder.may_compute.set()
    assert (await running)[0] == [vector_of(A)]
    assert (await setup.embed(A))[1].cache.status is status


class UnluckyComputations(dict):
    """Vectors that are always being computed for somebody else, and come to nothing."""

    waits = 0

    def get(self, digest):
        self.waits += 1
        end = asyncio.get_running_loop().create_future()
        end.set_result(None)
        return PendingEmbedding(0, end)


async def test_who_has_waited_often_enough_computes_its_own_and_waits_for_nothing_before():
    setup = EmbedderSetup()
    setup.embedder._cache.computing = computing = UnluckyComputations()
    assert (await setup.embed(A))[0] == [vector_of(A)]
    assert (computing.waits, len(computing)) == (8, 0)


async def test_without_coalescing_nobody_waits():
    setup = EmbedderSetup(encoder=GatedEncoder(), cache=CacheConfig(coalesce="off"))
    running = [asyncio.create_task(setup.embed(A)) for _ in range(2)]
    await turn()
    setup.encoder.may_compute.set()
    await asyncio.wait(running)
    assert len(setup.encoder.computed) == 2
