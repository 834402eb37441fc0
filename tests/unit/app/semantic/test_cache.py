"""Semantic cache of a gateway, from the first label to a served answer and to its end, with a scripted encoder."""

import asyncio
import hashlib
import math
import re
from contextlib import asynccontextmanager, suppress

import pytest
from msgspec.structs import replace

from maitred.app.models.router import Router
from maitred.app.request import answer_lookup, pipeline
from maitred.app.request.answer_sharing import AnswerSharing
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.request.pipeline import Pipeline
from maitred.app.semantic import audits, cache
from maitred.app.semantic.cache import SemanticCache
from maitred.cache.answer_cache import AnswerCache
from maitred.cache.backend import MemoryBackend
from maitred.cache.config import CacheConfig, SemanticConfig
from maitred.cache.semantic.scope import SCORED_LOOKUPS
from maitred.core.context import CacheStatus, RequestContext
from maitred.core.errors import LimitReached, NotCached, ReplicaUnavailable
from maitred.core.inference import CacheControl, Conversation, InferenceRequest
from maitred.core.request import SamplingParams, SimilarQuestion, SimilarQuestions, TokenDelta
from maitred.core.semantic_scope import (
    CertificationRecord,
    CertificationState,
    LookupLabel,
    LookupScore,
    LookupTrial,
    ScopePhase,
    ScopeRecord,
)
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import Endpoint
from maitred.routing.catalog import Catalog, ServedModel
from maitred.store.config import StoreConfig
from maitred.store.database import open_database
from maitred.store.semantic import SemanticStore
from maitred.text.chat_template import ChatTemplate
from tests.support.admission_services import ALICE, BOB, AdmissionSetup, StillClock, limit
from tests.support.stores import DEADLINE_S
from tests.unit.app.request.test_coalescing import DIGEST, GatedStream
from tests.unit.app.request.test_pipeline import EOS, STOP, TOKENIZER, MemoryReplica, ids, text_of

SETTINGS = SemanticConfig(training_labels=500, budget=0.1, audit_tokens_per_hour=1 << 40, timeout_s=10)
SCOPE = '["m","tenant","team","acme"]'
ENCODER = "an encoder"
WEIGHTS = b"weights of a verifier"
VERSION = hashlib.sha256(WEIGHTS).hexdigest()[:16]
RIGHT, WRONG = 3.0, -3.0
SYLLABLES = ("ba", "ke", "lo", "mu", "pi", "ra", "so", "ti")
STYLES = ("simple", "short", "full", "clear", "plain", "formal", "polite", "rough")


def subject(number):
    """A word without a meaning."""
    return "".join(SYLLABLES[number >> shift & 7] for shift in (9, 6, 3, 0))


def question(number, style=0):
    return f"please tell me about the {subject(number)} in a {STYLES[style]} style"


def subject_of(text):
    return re.findall(r"the (\w+) in", text)[-1]


async def until(condition):
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0)


class ScriptedEncoder:
    """Finds questions about the same subject at 0.9, and all others at 0.6; `mistaken` subjects count as all others."""

    version = ENCODER

    def __init__(self):
        self.index, self.recent, self.verifiers = {}, set(), {}
        self.updates, self.trained, self.mistaken = [], [], set()
        self.searches, self.is_up, self.longest = 0, True, 1000
        self.weights = WEIGHTS
        self.gate = None
        self.epoch = 1
        self.region = None

    def may_read(self, regions):
        return regions is None or self.region is None or self.region in regions

    def regions_of_label(self, regions):
        return None if regions is None else sorted(regions)

    def may_learn_from(self, label):
        return label.regions is None or self.region in label.regions

    def restart(self):
        self.epoch += 1
        self.index, self.recent, self.verifiers = {}, set(), {}

    @property
    def texts(self):
        return {text for _, text in self.index.values()}

    def tokens_of(self, text):
        if not self.is_up:
            raise ReplicaUnavailable
        return [1, 2] if len(text) <= self.longest else None

    async def search(self, search, tokens, flow, organisation, regions):
        if not self.is_up:
            raise ReplicaUnavailable
        self.searches += 1
        self.recent.add((search.partition, search.question))
        verifier = self.verifiers.get(search.scope)
        found = [
            SimilarQuestion(
                key, text, 0.9 if same else 0.6, None if not verifier else RIGHT if same else WRONG, (0.5, 0.5, 0.0)
            )
            for key, (partition, text) in self.index.items()
            if partition == search.partition
            for same in [self._same(text, search.question)]
        ]
        found.sort(key=lambda each: -each.cosine)
        if self.gate is not None:
            await self.gate.wait()
        version = f"{self.version}:1:{hashlib.sha256(verifier).hexdigest()[:16]}" if verifier else ""
        return SimilarQuestions(found[: search.count], version)

    async def train(self, labels):
        self.trained.append(labels)
        return self.weights

    def update(self, update):
        self.updates.append(update)
        for kept in update.kept:
            if (kept.partition, kept.question) in self.recent:
                self.index[kept.key] = (kept.partition, kept.question)
        for key in update.removed:
            self.index.pop(key, None)
        self.verifiers |= update.verifiers

    def _same(self, one, other):
        one, other = subject_of(one), subject_of(other)
        return one == other or bool({one, other} & self.mistaken)


class AnsweringReplica(MemoryReplica):
    """Answers each question by its subject."""

    gate = None

    def card(self):
        return replace(super().card(), digest=DIGEST, context_tokens=4096, kv_capacity_tokens=1 << 20)

    @asynccontextmanager
    async def generate(self, request):
        async with super().generate(request):
            yield AnsweringStream(self, request)


class AnsweringStream(GatedStream):
    async def __aiter__(self):
        asked = TOKENIZER.decode(self.request.prompt)
        if self.replica.gate is not None:
            await self.replica.gate.wait()
        yield [TokenDelta(0, ids(f"all about {subject_of(asked)}"))]
        yield [TokenDelta(0, [EOS], finish=STOP)]


class World:
    """A gateway with a semantic cache over a database."""

    def __init__(self, database, settings=SETTINGS, draw=0.0, limits=()):
        self.clock, self.replica, self.encoder = StillClock(), AnsweringReplica(), ScriptedEncoder()
        self.admission = AdmissionSetup(*limits)
        self.opened = 0
        self.cache = AnswerCache(
            CacheConfig(mode="semantic", semantic=settings), MemoryBackend(1 << 24, self.clock), self.clock
        )
        self.store = SemanticStore(database, self.clock)
        self.semantic = SemanticCache(self.cache, self.encoder, self.store, self.clock, lambda: draw)
        self.sharing = AnswerSharing(self.cache, None, self.semantic)
        self.pipeline = Pipeline(
            Router(Catalog([ServedModel("m", [self.replica], TOKENIZER)])),
            LocalFlowController(
                {"m": Dispatcher("m", [Endpoint("local", self.replica)], DispatchConfig(), self.clock)},
                self.admission.admission,
                self.clock,
            ),
            clock=self.clock,
            sharing=self.sharing,
        )

    async def ask(self, text, *, principal=ALICE, system=None, cache=None, context=None, **fields):
        """Returns the answer and what the cache has found."""
        messages = [{"role": "user", "content": text}]
        messages[:0] = [] if system is None else [{"role": "system", "content": system}]
        sampling = SamplingParams(0, 0, temperature=0.0)
        request = InferenceRequest("m", [Conversation(messages)], sampling, max_tokens=100, **fields)
        context = context or RequestContext("req", 0.0, principal=principal)
        parts = []
        request = replace(request, cache=cache or CacheControl())
        async with self.pipeline.generate(request, context) as answer:
            async for batch in answer:
                parts += batch
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return text_of(parts), context.cache

    async def store_now(self):
        """Waits until all look-ups are recorded, and stores them."""
        await until(lambda: not self.semantic.audits.count)
        await self.semantic.store()

    async def record(self):
        return await self.store.load(SCOPE, ENCODER)

    async def begin(self, record):
        """Goes on with a state that is in the database."""
        await self.store.remove(SCOPE, ENCODER)
        await self.store.change(SCOPE, ENCODER, lambda _: (replace(record, verifier=""), []))
        if record.verifier:
            await self.store.set_verifier(SCOPE, ENCODER, record.attempt, record.verifier, WEIGHTS)
            await self.store.change(SCOPE, ENCODER, lambda before: (replace(record, attempt=before.attempt), []))
        await self.open()

    async def open(self):
        """Lets the scope be loaded, and the verifier reach the encoder."""
        for _ in range(2):
            self.opened += 1
            await self.ask(question(4000 + self.opened), system="nothing else")
            await self.semantic.store()

    async def until(self, phase):
        await until(lambda: self.semantic._scopes[SCOPE].machine.phase is phase)

    @property
    def lines(self):
        return self.admission.ledger.events


CERTIFIED = ScopeRecord(
    encoder=ENCODER,
    labels=500,
    verifier=VERSION,
    certification=CertificationRecord(thresholds=(2.0,), lookups=500),
    budget=0.1,
    confidence=0.95,
)
NEARLY = replace(CERTIFIED, certification=CertificationRecord(thresholds=(2.0,), lookups=0))
SCORING = replace(CERTIFIED, certification=None)
TRIPPED = replace(CERTIFIED, certification=CertificationRecord(thresholds=(2.0,), lookups=500, tripped=True))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(audits, "_RETRY_S", 0.0)
    monkeypatch.setattr(cache, "_WARM_SEARCHES", 2)
    monkeypatch.setattr(cache, "_STORE_EVERY_S", 3600.0)  # the tests say when


@pytest.fixture
async def world(tmp_path, request):
    settings = getattr(request, "param", {})
    async with open_database(StoreConfig(folder=str(tmp_path), deadline_s=DEADLINE_S)) as database:
        system = World(database, **settings)
        task = asyncio.create_task(system.semantic.run())
        yield system
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_from_the_first_label_to_a_served_answer_and_its_audits(world):
    states = []
    await world.open()
    number = 0
    while (await world.record() or ScopeRecord(encoder="")).labels < 500:  # learning
        for _ in range(60):
            # Of each subject two questions: the first one's nearest is another subject, the second one's the first.
            _, found = await world.ask(question(number // 2, number % 2))
            states.append(found.semantic_state)
            number += 1
        await world.store_now()
    assert set(states[:500]) == {CertificationState.SHADOW}
    await world.until(ScopePhase.SCORING)
    (labels,) = world.encoder.trained
    assert len(labels) == 500
    assert {label.same for label in labels} == {True, False}
    assert all((label.asked.split()[5] == label.cached.split()[5]) == label.same for label in labels)
    record = await world.record()
    assert (record.verifier, record.labels) == (VERSION, 500)
    for _ in range(SCORED_LOOKUPS + 5):
        await world.ask(question(number // 2, number % 2))
        number += 1
    assert world.encoder.verifiers[SCOPE] == WEIGHTS
    await world.store_now()
    assert world.semantic._scopes[SCOPE].machine.phase is ScopePhase.CERTIFYING
    while world.semantic._scopes[SCOPE].machine.phase is ScopePhase.CERTIFYING:
        for _ in range(20):
            _, found = await world.ask(question(number // 2, number % 2))
            assert found.status is CacheStatus.MISS
            number += 1
        await world.store_now()
    await world.until(ScopePhase.CERTIFIED)
    computed = len(world.replica.requests)
    await world.ask(question(3000))
    text, found = await world.ask(question(3000, 1))
    assert (text, found.status) == (f"all about {subject(3000)}", CacheStatus.SEMANTIC)
    assert found.semantic_state is CertificationState.CERTIFIED
    assert found.similarity == 0.9
    assert found.false_hit_bound <= 0.1
    await world.store_now()
    record = await world.record()
    assert record.counts.served == 1
    assert record.counts.false_hits == 0
    assert record.counts.saved_tokens == sum(line.saved_tokens for line in world.lines) > 0
    assert len(world.replica.requests) == computed + 2, "one for its own, and one for the audit"
    assert {line.organisation for line in world.lines} == {"acme", "operators"}


async def certified(world):
    """A certified scope, with one question in the cache."""
    await world.begin(CERTIFIED)
    _, found = await world.ask(question(1))
    assert (found.status, found.semantic_state) == (CacheStatus.MISS, CertificationState.CERTIFIED)


@pytest.mark.parametrize("world", [{"draw": 1.0}], indirect=True)
async def test_a_served_answer_costs_its_tenant_nothing_and_is_not_kept_again(world):
    await certified(world)
    for style in (1, 2):
        text, found = await world.ask(question(1, style))
        assert (text, found.status) == (f"all about {subject(1)}", CacheStatus.SEMANTIC)
        line = world.lines[-1]
        assert (line.cache, line.prompt_tokens, line.output_tokens, line.cost_nusd) == ("semantic", 0, 0, 0)
        assert line.saved_tokens > 0
    assert question(1) in world.encoder.texts
    assert world.encoder.texts.isdisjoint({question(1, 1), question(1, 2)})
    assert len(world.replica.requests) == 3
    assert len(world.encoder.updates[-1].served) == 1
    _, found = await world.ask(question(1))
    assert found.status is CacheStatus.HIT, "the own answer stands above"


@pytest.mark.parametrize("world", [{"draw": 1.0}], indirect=True)
async def test_look_ups_that_are_not_drawn_are_not_audited(world):
    await certified(world)
    for number in range(20):
        await world.ask(question(1, number % 8))
    await world.store_now()
    assert (await world.record()).certification.lookups == 500
    assert {line.organisation for line in world.lines} == {"acme"}


@pytest.mark.parametrize("world", [{"draw": 0.05}], indirect=True)
async def test_false_hits_trip_the_scope_and_nothing_is_served_any_more(world):
    await certified(world)
    world.encoder.mistaken = {subject(1)}
    served = 0
    for number in range(2, 200):
        text, found = await world.ask(question(number))
        served += found.status is CacheStatus.SEMANTIC
        assert text == f"all about {subject(1 if found.status is CacheStatus.SEMANTIC else number)}"
        await world.store_now()
        if world.semantic._scopes[SCOPE].machine.phase is ScopePhase.TRIPPED:
            break
    assert 2 < served < 60
    searches = world.encoder.searches
    for number in range(300, 310):
        _, found = await world.ask(question(number))
        assert (found.status, found.semantic_state) == (CacheStatus.MISS, CertificationState.TRIPPED)
        assert found.similarity is None
    assert world.encoder.searches == searches, "nobody searches in vain"
    counts = (await world.record()).counts
    assert (counts.served, counts.false_hits) == (served, served)


async def test_a_question_that_may_not_go_to_the_region_of_the_encoder_is_not_known_there(world):
    await certified(world)
    card = world.replica.card()
    world.replica.card = lambda: replace(card, region="eu")
    world.encoder.region = "us"
    bound, searches = replace(ALICE, regions=frozenset({"eu"})), world.encoder.searches
    _, found = await world.ask(question(1, 1), principal=bound)
    assert found.status is CacheStatus.MISS
    assert world.encoder.searches == searches
    assert question(1, 1) not in {kept.question for update in world.encoder.updates for kept in update.kept}
    world.encoder.region = "eu"
    await world.ask(question(1, 2), principal=bound)
    assert world.encoder.searches == searches + 1


async def test_labels_are_of_questions_with_the_same_regions_and_only_an_encoder_there_learns_from_them(world):
    card = world.replica.card()
    world.replica.card = lambda: replace(card, region="eu")
    world.encoder.region = "eu"
    bound = replace(ALICE, regions=frozenset({"eu"}))
    await world.begin(ScopeRecord(encoder=ENCODER))
    await world.ask(question(1))
    await world.ask(question(1, 1), principal=bound)
    await world.ask(question(1, 2))
    await world.ask(question(1, 3), principal=bound)
    await world.store_now()
    labels = await world.store.labels(SCOPE, ENCODER, 9)
    assert {(label.cached, label.asked): label.regions for label in labels} == {
        (question(1), question(1, 2)): None,
        (question(1, 1), question(1, 3)): ["eu"],
    }
    world.encoder.region, world.encoder.weights = "us", b""
    record = await world.record()
    await world.store.change(SCOPE, ENCODER, lambda before: (replace(before, labels=CERTIFIED.labels), []))
    await world.semantic.forget(SCOPE)
    await world.semantic.store()
    await until(lambda: world.encoder.trained)
    assert [label.regions for label in world.encoder.trained[0]] == [None]
    await until(lambda: world.semantic._scopes[SCOPE].train_at_s < math.inf)
    assert (await world.record()).untaught == record.untaught, "another gateway may learn from the others"


async def test_an_operator_lets_a_tripped_scope_begin_anew(world):
    await world.begin(TRIPPED)
    assert (await world.ask(question(1)))[1].semantic_state is CertificationState.TRIPPED
    await world.store.reset(SCOPE, ENCODER, keep_labels=False)
    await world.semantic.forget(SCOPE)
    await world.open()
    _, found = await world.ask(question(2))
    assert found.semantic_state is CertificationState.SHADOW
    assert world.encoder.verifiers.get(SCOPE, b"") == b""


@pytest.mark.parametrize(
    "other",
    [
        {"principal": replace(BOB, tenants=("other", "acme"))},
        {"system": "Be brief."},
        {"seed": 7},
        {"stops": ("x",)},
        {"cache": CacheControl(namespace="mine")},
    ],
)
async def test_others_get_nothing(world, other):
    await certified(world)
    _, found = await world.ask(question(1, 1), **other)
    assert found.status is CacheStatus.MISS


@pytest.mark.parametrize(
    "text",
    [
        question(1, 1).replace("please", "please do not"),
        question(1, 1) + " for 3 cards",
        question(1, 1) + " on Monday",
        question(1, 1) + " of Berlin",
        question(1, 1) + " in `config.yaml`",
    ],
)
async def test_guards_stand_before_every_score(world, text):
    await certified(world)
    _, found = await world.ask(text)
    assert (found.status, found.semantic_state) == (CacheStatus.MISS, CertificationState.CERTIFIED)
    assert found.similarity == 0.9


@pytest.mark.parametrize("control", [CacheControl(no_cache=True), CacheControl(no_store=True)])
async def test_controls_of_a_caller_keep_its_question_from_being_looked_up(world, control):
    await certified(world)
    searches = world.encoder.searches
    _, found = await world.ask(question(1, 1), cache=control)
    assert (found.status, found.semantic_state) == (CacheStatus.MISS, "")
    assert world.encoder.searches == searches
    await world.ask(question(2), cache=control)
    assert question(2) not in world.encoder.texts


async def test_the_answer_is_no_older_than_its_caller_wants(world):
    await certified(world)
    world.clock.now_s = 30.0
    _, found = await world.ask(question(1, 1), cache=CacheControl(max_age_s=30.0))
    assert (found.status, found.age_s) == (CacheStatus.SEMANTIC, 30.0)
    _, found = await world.ask(question(1, 2), cache=CacheControl(max_age_s=29.0))
    assert found.status is CacheStatus.MISS
    _, found = await world.ask(question(1, 3))
    assert found.status is CacheStatus.SEMANTIC, "it is still there for others"


async def test_who_asks_the_same_meanwhile_looks_for_a_similar_question_by_itself(world):
    await certified(world)
    world.clock.now_s = 30.0
    world.encoder.gate = asyncio.Event()
    first = asyncio.create_task(world.ask(question(1, 1)))
    searches = world.encoder.searches
    await until(lambda: world.encoder.searches > searches)
    second = asyncio.create_task(world.ask(question(1, 1), cache=CacheControl(max_age_s=29.0)))
    await until(lambda: sum(map(len, (answer._readers for answer in world.sharing._coalesced.values()))) == 2)
    world.encoder.gate.set()
    assert (await first)[1].status is CacheStatus.SEMANTIC
    assert (await second)[1].status is CacheStatus.MISS, "the answer is too old for it"


async def test_only_if_cached_takes_the_answer_of_a_similar_question(world):
    await certified(world)
    control = CacheControl(only_if_cached=True)
    assert (await world.ask(question(1, 1), cache=control))[1].status is CacheStatus.SEMANTIC
    with pytest.raises(NotCached):
        await world.ask(question(2), cache=control)


async def test_a_question_whose_answer_is_gone_is_removed_from_the_index(world):
    await certified(world)
    assert question(1) in world.encoder.texts
    world.clock.now_s = 3600.0
    _, found = await world.ask(question(1, 1))
    assert found.status is CacheStatus.MISS
    assert question(1) not in world.encoder.texts
    assert question(1, 1) in world.encoder.texts


async def test_a_restarted_encoder_gets_the_verifier_again_and_the_look_up_counts_for_nothing(world):
    await certified(world)
    await world.store_now()
    lookups = (await world.record()).certification.lookups
    world.encoder.restart()
    world.clock.now_s = 2.0
    before = len(world.encoder.updates)
    world.encoder.gate, searches = asyncio.Event(), world.encoder.searches
    asking = [asyncio.create_task(world.ask(question(number, 1))) for number in range(1, 20)]
    await until(lambda: world.encoder.searches == searches + 19)
    world.encoder.gate.set()
    asked = await asyncio.gather(*asking)
    assert {(found.status, found.semantic_state) for _, found in asked} == {(CacheStatus.MISS, "")}
    assert world.encoder.verifiers == {SCOPE: WEIGHTS}
    assert sum(bool(update.verifiers) for update in world.encoder.updates[before:]) == 1
    await world.store_now()
    assert (await world.record()).certification.lookups == lookups
    # The question that brought the verifier stands in the index again.
    _, found = await world.ask(question(1, 2))
    assert found.status is CacheStatus.SEMANTIC


async def test_without_its_encoder_every_answer_is_computed(world):
    await certified(world)
    world.encoder.is_up = False
    for style in (1, 2):
        text, found = await world.ask(question(1, style))
        assert (text, found.status) == (f"all about {subject(1)}", CacheStatus.MISS)
    world.encoder.is_up = True
    assert (await world.ask(question(1, 3)))[1].status is CacheStatus.SEMANTIC


async def test_an_encoder_that_takes_too_long_is_not_waited_for(world):
    await certified(world)
    world.cache.reconfigure(replace(world.cache.config, semantic=replace(SETTINGS, timeout_s=0.005)))

    async def search(*_, **__):
        await asyncio.Event().wait()

    world.encoder.search = search
    assert (await world.ask(question(1, 1)))[1].status is CacheStatus.MISS


async def test_a_question_that_the_encoder_cannot_read_whole_is_not_looked_up(world):
    await certified(world)
    world.encoder.longest = 10
    assert (await world.ask(question(1, 1)))[1].semantic_state == ""


async def test_a_database_that_is_away_loses_no_outcome_and_stops_no_answer(world, monkeypatch):
    await certified(world)
    await world.store_now()
    before = await world.record()

    async def away(*_, **__):
        raise ReplicaUnavailable

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "change", away)
        for style in range(1, 8):
            assert (await world.ask(question(1, style)))[1].status is CacheStatus.SEMANTIC
        await world.store_now()
    await world.store_now()
    after = await world.record()
    assert after.counts.served - before.counts.served == 7
    assert after.certification.lookups - before.certification.lookups == 7


async def test_an_own_answer_that_its_client_left_is_computed_as_a_copy(world):
    await world.begin(NEARLY)
    await world.ask(question(1))
    await world.store_now()
    before = (await world.record()).certification.lookups
    world.replica.gate = asyncio.Event()
    asking = asyncio.create_task(world.ask(question(1, 1)))
    await until(lambda: world.replica.open)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    world.replica.gate.set()
    await world.store_now()
    assert (await world.record()).certification.lookups == before + 1
    assert world.semantic.audits.tokens["m"] > 0
    assert world.lines[-1].organisation == "operators"


@pytest.mark.parametrize("world", [{"draw": 1.0}], indirect=True)
async def test_equal_requests_share_one_look_up(world):
    await certified(world)
    searches = world.encoder.searches
    found = [found.status for _, found in await asyncio.gather(*(world.ask(question(1, 1)) for _ in range(5)))]
    assert found[0] is CacheStatus.SEMANTIC
    assert set(found[1:]) <= {CacheStatus.COALESCED, CacheStatus.SEMANTIC}
    assert world.encoder.searches - searches <= 5
    assert len(world.replica.requests) == 3


@pytest.mark.parametrize("world", [{"limits": [limit("key:alice", "requests_per_minute", 3)]}], indirect=True)
async def test_a_served_answer_is_a_request_that_is_admitted(world):
    await certified(world)
    context = RequestContext("req", 0.0, principal=ALICE)
    with pytest.raises(LimitReached):
        await world.ask(question(1, 1), context=context)
    assert (context.cache.status, context.cache.semantic_state) == (CacheStatus.MISS, CertificationState.CERTIFIED)
    assert context.cache.age_s is None
    await world.store_now()
    counts = (await world.record()).counts
    assert (counts.served, counts.saved_tokens) == (0, 0)
    assert not any(update.served for update in world.encoder.updates)


async def test_scores_without_labels_become_thresholds_and_labels_of_another_phase_do_not_count(world):
    await world.begin(SCORING)
    await world.ask(question(1))
    await world.ask(question(1, 1))
    await world.store_now()
    record = await world.record()
    assert record.scores[-2:] == (None, RIGHT)
    assert (record.labels, record.counts.same) == (500, 0)


async def test_scores_of_an_index_that_has_just_begun_choose_no_thresholds(world, monkeypatch):
    monkeypatch.setattr(cache, "_WARM_SEARCHES", 6)
    await world.begin(SCORING)

    async def scores(count):
        for number in range(count):
            await world.ask(question(number))
        await world.store_now()
        return len((await world.record()).scores)

    assert await scores(20) > 10
    before = len((await world.record()).scores)
    world.encoder.restart()
    world.clock.now_s += 2.0
    await world.ask(question(100))  # it brings the verifier
    world.cache._backend = MemoryBackend(1 << 24, world.clock)
    assert await scores(4) == before
    assert await scores(10) == before + 6, "four are in the cache"


async def test_outcomes_are_told_apart_by_phase(world):
    for record, kind in ((None, LookupLabel), (SCORING, LookupScore), (NEARLY, LookupTrial)):
        await world.semantic.forget(SCOPE)
        await (world.open() if record is None else world.begin(record))
        await world.ask(question(1), system="a")
        await world.ask(question(1, 1), system="a")
        await until(lambda: not world.semantic.audits.count)
        assert type(world.semantic._scopes[SCOPE].outcomes[-1]) is kind
        world.cache._backend = MemoryBackend(1 << 24, world.clock)
        world.encoder.restart()


@pytest.mark.parametrize("world", [{"limits": [limit("key:bob", "output_tokens", 2)]}], indirect=True)
async def test_an_answer_that_is_too_long_for_its_caller_is_computed(world):
    await certified(world)
    computed = len(world.replica.requests)
    _, found = await world.ask(question(1, 1), principal=BOB)
    assert found.status is CacheStatus.MISS
    assert len(world.replica.requests) > computed
    assert (await world.ask(question(1, 2)))[1].status is CacheStatus.SEMANTIC


async def test_answers_of_a_server_that_is_away_are_audited_when_it_is_back(world):
    await certified(world)
    await world.store_now()
    before = (await world.record()).certification.lookups
    world.replica.up = False
    assert (await world.ask(question(1, 1)))[1].status is CacheStatus.SEMANTIC
    for _ in range(50):
        await asyncio.sleep(0)
    await world.semantic.store()
    assert (await world.record()).certification.lookups == before
    world.replica.up = True
    await world.store_now()
    assert (await world.record()).certification.lookups == before + 1
    assert world.lines[-1].organisation == "operators"


@pytest.mark.parametrize("record", [CERTIFIED, NEARLY], ids=["certified", "certifying"])
async def test_no_look_up_is_a_trial_while_the_answers_are_away(world, monkeypatch, record):
    await world.begin(record)
    await world.ask(question(1))
    await world.store_now()
    before = (await world.record()).certification

    async def away(*_, **__):
        return None

    with monkeypatch.context() as patch:
        patch.setattr(world.cache, "find", away)
        for style in range(1, 6):
            assert (await world.ask(question(1, style)))[1].status is CacheStatus.MISS
            await world.ask(question(1, style), cache=CacheControl(namespace=f"{style}"))  # it finds nothing
        await world.store_now()
    after = (await world.record()).certification
    assert after.lookups - before.lookups == 5, "only those that found nothing"
    await world.ask(question(1, 6))
    await world.ask(question(1, 7))
    await world.store_now()
    assert (await world.record()).certification.lookups - after.lookups == 2


async def test_nothing_is_served_while_audits_wait_for_too_long(world, monkeypatch):
    monkeypatch.setattr(audits, "_MOST_OF_SCOPE", 3)
    await certified(world)
    await world.store_now()
    world.replica.up = False
    for style in (1, 2, 3):
        assert (await world.ask(question(1, style)))[1].status is CacheStatus.SEMANTIC
    assert world.semantic.audits.count == 3
    with pytest.raises(ReplicaUnavailable):
        await world.ask(question(1, 4))
    world.replica.up = True
    await world.store_now()
    assert (await world.ask(question(1, 5)))[1].status is CacheStatus.SEMANTIC


async def test_a_smaller_budget_holds_for_the_next_look_up(world, monkeypatch):
    await certified(world)
    assert (await world.ask(question(1, 1)))[1].status is CacheStatus.SEMANTIC
    begun, gate, change = asyncio.Event(), asyncio.Event(), world.store.change

    async def change_late(*args):
        record = await change(*args)
        begun.set()
        await gate.wait()
        return record

    monkeypatch.setattr(world.store, "change", change_late)
    storing = asyncio.create_task(world.semantic.store())
    await begun.wait()
    config = replace(world.cache.config, semantic=replace(SETTINGS, budget=0.01))
    world.cache.reconfigure(config)
    world.semantic.reconfigure(config)
    _, found = await world.ask(question(1, 2))
    assert (found.status, found.semantic_state) == (CacheStatus.MISS, CertificationState.SHADOW)
    gate.set()
    await storing  # what was stored by the settings of before
    _, found = await world.ask(question(1, 3))
    assert (found.status, found.semantic_state) == (CacheStatus.MISS, CertificationState.SHADOW)


@pytest.mark.parametrize("verb", ["reset", "remove"])
async def test_what_another_gateway_does_to_an_idle_scope_holds_soon(world, verb):
    await certified(world)
    await world.store_now()
    world.clock.now_s += 1.0
    if verb == "reset":
        await world.store.reset(SCOPE, ENCODER, keep_labels=False)
    else:
        await world.store.remove(SCOPE, ENCODER)
    world.clock.now_s += 5.0
    await world.semantic.store()
    assert (await world.ask(question(1, 1)))[1].status is CacheStatus.MISS
    await world.semantic.store()
    assert world.semantic._scopes[SCOPE].machine.phase is ScopePhase.LEARNING


async def test_scopes_that_nobody_changes_are_not_loaded_again(world, monkeypatch):
    await certified(world)
    for _ in range(2):
        await world.store_now()
        world.clock.now_s += 5.0

    async def load(*_):
        raise AssertionError

    monkeypatch.setattr(world.store, "load", load)
    await world.semantic.store()


async def test_another_encoder_in_place_of_the_one_has_a_scope_of_its_own(world, monkeypatch):
    await certified(world)
    monkeypatch.setattr(ScriptedEncoder, "version", "another encoder")
    world.encoder.restart()
    world.clock.now_s += 5.0
    await world.semantic.store()
    await world.open()
    assert world.semantic._scopes[SCOPE].machine.phase is ScopePhase.LEARNING
    assert (await world.record()).verifier == VERSION


async def test_an_encoder_that_is_down_loses_no_outcome(world, monkeypatch):
    await certified(world)
    await world.store_now()
    before = await world.record()
    for style in range(1, 8):
        await world.ask(question(1, style))

    def down(_):
        raise ReplicaUnavailable

    with monkeypatch.context() as patch:
        patch.setattr(ScriptedEncoder, "version", property(down))
        await world.store_now()
    await world.store_now()
    after = await world.record()
    assert after.counts.served - before.counts.served == 7
    assert after.certification.lookups - before.certification.lookups == 7


async def test_a_scope_that_begins_anew_during_a_training_gets_no_verifier_from_it(world, monkeypatch):
    begun, gate = asyncio.Event(), asyncio.Event()

    async def train(_):
        begun.set()
        await gate.wait()
        return WEIGHTS

    monkeypatch.setattr(world.encoder, "train", train)
    await world.begin(replace(CERTIFIED, verifier="", certification=None))
    await begun.wait()
    await world.store.reset(SCOPE, ENCODER, keep_labels=False)  # by another gateway
    await world.ask(question(1))
    await world.store_now()
    machine = world.semantic._scopes[SCOPE].machine
    assert machine.phase is ScopePhase.LEARNING
    gate.set()
    await until(lambda: world.semantic._scopes[SCOPE].machine is not machine)
    assert (await world.record()).verifier == ""


async def test_labels_that_teach_nothing_are_tried_once(world):
    world.encoder.weights = b""
    await world.begin(replace(CERTIFIED, verifier="", certification=None))
    for _ in range(5):
        world.clock.now_s += 3600.0
        await world.semantic.store()
        await until(lambda: world.semantic._scopes[SCOPE].train_at_s < math.inf)
    assert len(world.encoder.trained) == 1


async def test_a_training_that_failed_is_done_again(world, monkeypatch):
    await world.begin(replace(CERTIFIED, verifier="", certification=None))
    scope = world.semantic._scopes[SCOPE]
    await until(lambda: scope.train_at_s < math.inf)
    world.clock.now_s += 1.0
    await world.store.reset(SCOPE, ENCODER, keep_labels=True)
    train = world.encoder.train

    async def down(_):
        raise ReplicaUnavailable

    monkeypatch.setattr(world.encoder, "train", down)
    for _ in range(4):
        world.clock.now_s += 300.0
        await world.semantic.store()
        await until(lambda: scope.train_at_s < math.inf)
    assert (await world.record()).verifier == ""
    monkeypatch.setattr(world.encoder, "train", train)
    for _ in range(4):
        world.clock.now_s += 300.0
        await world.semantic.store()
        await until(lambda: scope.train_at_s < math.inf)
    assert (await world.record()).verifier == VERSION


@pytest.mark.parametrize("control", [CacheControl(no_store=True), CacheControl(max_age_s=29.0)])
async def test_who_wants_no_similar_answer_shares_none_that_another_caller_gets(world, control):
    await certified(world)
    world.clock.now_s, world.encoder.gate, searches = 30.0, asyncio.Event(), world.encoder.searches
    first = asyncio.create_task(world.ask(question(1, 1)))
    await until(lambda: world.encoder.searches > searches)
    second = asyncio.create_task(world.ask(question(1, 1), cache=control))
    for _ in range(20):
        await asyncio.sleep(0)
    world.encoder.gate.set()
    assert (await first)[1].status is CacheStatus.SEMANTIC
    assert (await second)[1].status is CacheStatus.MISS


async def test_an_answer_of_a_server_is_served_until_it_says_that_it_runs_something_else(world, monkeypatch):
    said = "fp_1"

    def at_server(*args):
        lookup = answer_lookup.make_lookup(*args)
        lookup.key, lookup._server_fingerprint = replace(lookup.key, server="s"), lambda: said
        return lookup

    monkeypatch.setattr(pipeline, "make_lookup", at_server)
    monkeypatch.setattr(answer_lookup, "fingerprint_in", lambda _: said)
    await certified(world)
    assert (await world.ask(question(1, 1)))[1].status is CacheStatus.SEMANTIC
    said = "fp_2"
    assert (await world.ask(question(1, 2)))[1].status is CacheStatus.MISS
    assert question(1) not in world.encoder.texts


async def test_an_answer_to_a_prompt_with_the_date_is_of_no_use_on_another_day(world, monkeypatch):
    today = "26 July"
    monkeypatch.setattr(ChatTemplate, "times", lambda _: [today])
    await certified(world)
    assert (await world.ask(question(1, 1)))[1].status is CacheStatus.SEMANTIC
    today = "27 July"
    assert (await world.ask(question(1, 2)))[1].status is CacheStatus.MISS


async def test_what_was_being_loaded_when_an_operator_changed_a_scope_is_loaded_again(world, monkeypatch):
    await certified(world)
    begun, gate, load = asyncio.Event(), asyncio.Event(), world.store.load

    async def load_late(*name):
        record = await load(*name)
        begun.set()
        await gate.wait()
        return record

    monkeypatch.setattr(world.store, "load", load_late)
    world.semantic.reconfigure(world.cache.config)
    storing = asyncio.create_task(world.semantic.store())
    await begun.wait()
    await world.store.reset(SCOPE, ENCODER, keep_labels=False)
    await world.semantic.forget(SCOPE)
    gate.set()
    await storing
    await world.semantic.store()
    assert world.semantic._scopes[SCOPE].machine.phase is ScopePhase.LEARNING
