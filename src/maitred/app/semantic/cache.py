"""Semantic cache of a gateway: it serves answers of similar questions while it is certified how rarely they are wrong.

::

    exact cache: miss -> search at the encoder -> guards -> the best question -> its answer in the exact cache
                                                                                  |
      certified, and its score reaches the threshold: served <--------------------+
      else: computed                                                              |
      audited: compared with the own answer, recorded  <--------------------------+

What look-ups and audits find is stored once a second, by scope; who serves and from which score on is decided by what
is stored, for all gateways together.
"""

import asyncio
import hashlib
import logging
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import msgspec
from msgspec.structs import replace

from maitred.app.request.planner import flow_of
from maitred.app.semantic.audits import AuditedAnswer, AuditQueue
from maitred.app.semantic.encoder import QuestionEncoder
from maitred.app.semantic.question import UserQuestion
from maitred.cache.answer import CachedAnswer
from maitred.cache.answer_cache import AnswerCache
from maitred.cache.answer_key import AnswerKey, answer_digest
from maitred.cache.config import CacheConfig
from maitred.cache.semantic.scope import LEAST_COSINE, SemanticScope, apply_outcomes
from maitred.core.clock import Clock
from maitred.core.context import CacheResult, CacheStatus, RequestContext
from maitred.core.errors import MaitredError
from maitred.core.flow import Flow
from maitred.core.inference import TextDelta
from maitred.core.request import LabelledPair, SimilarQuestion, SimilarQuestions, SimilarSearch
from maitred.core.semantic_scope import (
    LookupLabel,
    LookupOutcome,
    LookupScore,
    LookupTally,
    LookupTrial,
    ScopePhase,
    ScopeRecord,
)
from maitred.observe.metrics.semantic import SemanticCacheState
from maitred.store.semantic import SemanticStore
from maitred.text.question_guards import difference
from maitred.text.wording import Wording
from maitred.wire.frames import KeptQuestion, UpdateSimilar

if TYPE_CHECKING:
    from maitred.app.request.answer_lookup import AnswerLookup

_log = logging.getLogger(__name__)

_CANDIDATES = 3
"""Cached questions that are judged for one look-up."""
_STORE_EVERY_S = 1.0
_CHECK_EVERY_S = 5.0
"""Time after which a scope that nobody asks is known to be as it is in the database."""
_MOST_OUTCOMES = 1_000
"""Outcomes of a scope that wait for the database."""
_MOST_SCOPES = 1_000
"""Scopes that are kept in memory, each with the weights of a verifier."""
_WARM_SEARCHES = 1_000
"""Searches of a scope in one process of the encoder from which on its index is as full as when the labels came."""
_TRAIN_AGAIN_S = 60.0
_TRAINING_LEASE_S = 600.0
"""Time that a training may take, beside texts that go before it. After it another gateway may train as well."""
_SEND_AGAIN_S = 1.0
_VERSION_DIGITS = 16


class SimilarAnswer(NamedTuple):
    """Answer of a similar question."""

    answer: CachedAnswer
    age_s: float
    key: AnswerKey
    question: SimilarQuestion


class SemanticLookup:
    """Look-up of one request among the questions whose answers are in the cache.

    It is the first context of the request's stack, so it is left when the answer is complete or has failed.

    Args:
        service: The semantic cache.
        lookup: Look-up of the request in the cache of answers, with its question.
        context: Record of the request.
        flow: Flow of the request.
    """

    def __init__(
        self, service: "SemanticCache", lookup: "AnswerLookup", *, context: RequestContext, flow: Flow
    ) -> None:
        assert lookup.question is not None
        assert lookup.compute_copy is not None
        self.principal = lookup.principal
        self.context = context
        self.question: UserQuestion = lookup.question
        if self.regions is not None:  # a label is of two questions that may be read in the same regions
            partition = answer_digest([self.question.partition, "regions", *sorted(self.regions)])
            self.question = replace(self.question, partition=partition)
        self.flow = flow
        self.answers = lookup
        self.compute_copy = lookup.compute_copy
        self.own_answer: asyncio.Future[Sequence[TextDelta] | None] = asyncio.get_running_loop().create_future()
        self.served: SimilarAnswer | None = None
        self._service = service
        lookup.on_stored = self._on_stored

    @property
    def regions(self) -> frozenset[str] | None:
        """Regions in which the request may be computed; None: in all regions."""
        request = self.context.request
        return self.principal.regions_for(None if request is None else request.regions)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The recording of the answer ends in this turn of the event loop, if it is complete.
        asyncio.get_running_loop().call_soon(self._on_end)

    async def find(self) -> CachedAnswer | None:
        """Returns the answer of a similar question; None: none may be served."""
        return await self._service.find(self)

    def on_admitted(self) -> None:
        """Counts the answer that was found as served, and notes it in the context."""
        self._service.count_served(self)

    def _on_stored(self, deltas: Sequence[TextDelta]) -> None:
        self._service.keep(self.question, self.answers.key.digest, self.regions)
        if not self.own_answer.done():
            self.own_answer.set_result(deltas)

    def _on_end(self) -> None:
        if not self.own_answer.done():
            self.own_answer.set_result(None)


class _Scope:
    """Scope in this process: its stored state, and what is to be stored.

    Attributes:
        machine: The state.
        version: Version of its verifier; empty: it has none.
        weights: Weights of its verifier.
        outcomes: What look-ups have found since it was stored last.
        tally: Their number.
        epoch: Process of the encoder that has searched last.
        searches: Searches of that process.
        train_at_s: Time from which on its verifier may be trained; infinite while that is done.
        send_at_s: Time from which on its weights may be sent to the encoder.
        changed_s: Wall time of its last change in the database, when that was checked last.
    """

    def __init__(self, machine: SemanticScope) -> None:
        self.machine = machine
        self.version = ""
        self.weights = b""
        self.outcomes: list[LookupOutcome] = []
        self.tally = LookupTally()
        self.epoch = 0
        self.searches = 0
        self.train_at_s = 0.0
        self.send_at_s = 0.0
        self.changed_s = 0.0


class SemanticCache:
    """Semantic cache of a gateway.

    Args:
        answers: Cache of answers.
        encoder: Encoder of questions.
        store: Store of the scopes and their labels.
        clock: The clock.
        draw: Returns a number from 0 to 1, by which audits are drawn.

    Attributes:
        audits: Look-ups that are not recorded yet.
    """

    def __init__(
        self,
        answers: AnswerCache,
        encoder: QuestionEncoder,
        store: SemanticStore,
        clock: Clock,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._answers = answers
        self._encoder = encoder
        self._store = store
        self._clock = clock
        self._draw = draw
        settings = answers.config.semantic
        self.audits = AuditQueue(clock, settings.audit_tokens_per_hour, settings.answer_agreement)
        self._scopes: OrderedDict[str, _Scope] = OrderedDict()
        self._wanted: dict[str, None] = {}
        """Scopes that were asked for and are not loaded."""
        self._tasks: asyncio.TaskGroup | None = None
        self._has_failed = False
        self._check_at_s = 0.0
        self._labels: Counter[tuple[str, bool]] = Counter()
        self._results: Counter[tuple[str, str]] = Counter()
        self._false_hits: Counter[str] = Counter()

    def reconfigure(self, config: CacheConfig) -> None:
        """Applies new settings to later look-ups. A scope with another budget serves nothing from now on."""
        self.audits.reconfigure(config.semantic.audit_tokens_per_hour, config.semantic.answer_agreement)
        for scope in self._scopes.values():
            scope.machine = SemanticScope(scope.machine.record, config.semantic)
        self._wanted.update(dict.fromkeys(self._scopes))

    async def forget(self, scope: str) -> None:
        """Drops what is known, or being loaded, of a scope that an operator has changed, and has it loaded again."""
        self._scopes.pop(scope, None)
        self._wanted[scope] = None

    async def run(self) -> None:
        """Records and stores what look-ups find, and trains verifiers, until the task is cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self.audits.run(), name="audits")
            while True:
                await asyncio.sleep(_STORE_EVERY_S)
                await self.store()

    async def store(self) -> None:
        """Stores what look-ups have found, and loads the scopes that were asked for."""
        try:
            for name in [*self._wanted]:
                self._wanted.pop(name, None)  # who wants it from now on wants what is stored from now on
                try:
                    await self._load(name)
                except BaseException:
                    self._wanted[name] = None
                    raise
            await self._check_changes()
            for name, scope in [*self._scopes.items()]:
                if scope.outcomes or scope.tally.lookups:
                    await self._store_outcomes(name, scope)
                self._train_if_due(name, scope)
        except MaitredError as failure:
            if not self._has_failed:
                _log.warning("The semantic cache learns nothing for now: %s", failure.message)
            self._has_failed = True
        else:
            self._has_failed = False

    def states(self) -> Mapping[str, SemanticCacheState]:
        """Returns the state for each model that requests have asked for."""
        scopes: dict[str, list[SemanticScope]] = {model: [] for model, _ in (*self._labels, *self._results)}
        for name, scope in self._scopes.items():
            scopes.setdefault(msgspec.json.decode(name, type=list[str])[0], []).append(scope.machine)
        return {
            model: SemanticCacheState(
                scopes=Counter(str(machine.state) for machine in machines),
                bound=max((machine.bound for machine in machines if machine.threshold is not None), default=None),
                labels={is_same: self._labels[model, is_same] for is_same in (True, False)},
                audits={result: self._results[model, result] for result in ("same", "false", "none", "skipped")},
                false_hits=self._false_hits[model],
                audit_tokens=self.audits.tokens[model],
            )
            for model, machines in scopes.items()
        }

    # --- a request ---

    def look_up(self, lookup: "AnswerLookup", context: RequestContext) -> "SemanticLookup":
        """Returns the look-up of a request."""
        assert context.request is not None
        flow = flow_of(lookup.principal, context.request)
        return SemanticLookup(self, lookup, context=context, flow=flow)

    async def find(self, lookup: SemanticLookup) -> CachedAnswer | None:
        """Returns the answer of a similar question that may be served; None: there is none.

        The context of the request gets what is known of the scope.
        """
        question, settings = lookup.question, self._answers.config.semantic
        scope = self._scopes.get(question.scope)
        if scope is None:
            self._wanted[question.scope] = None
            return None
        self._scopes.move_to_end(question.scope)
        machine = scope.machine
        if machine.phase is ScopePhase.TRIPPED:
            self._note(machine, lookup.context, None)
            return None
        # This must be known before anybody knows what will be found.
        is_audited = machine.threshold is None or self._draw() < settings.audit_share
        # What cannot be recorded is not audited, and without audits nothing is served for long.
        has_capacity = len(scope.outcomes) < _MOST_OUTCOMES and self.audits.has_capacity(question.scope)
        if is_audited and not (has_capacity and self.audits.has_tokens()):
            is_audited = False
            self._results[question.model, "skipped"] += 1
        try:
            async with asyncio.timeout(settings.timeout_s):
                found = await self._search(lookup)
            epoch = self._encoder.epoch
        except (MaitredError, TimeoutError):
            return None
        if found is None:
            return None
        scope.searches = scope.searches + 1 if epoch == scope.epoch else 1
        scope.epoch = epoch
        if _version_of(found.verifier) != scope.version:
            # The encoder has restarted, or the scope has another verifier: this look-up counts for nothing.
            now_s = self._clock.monotonic_s()
            if now_s >= scope.send_at_s:  # not once for each look-up that is under way
                scope.send_at_s = now_s + _SEND_AGAIN_S
                self._encoder.update(UpdateSimilar(verifiers={question.scope: scope.weights}))
            return None
        best, is_known = await self._best(found.found, lookup)
        score = None if best is None else best.question.score
        if is_audited and is_known:
            self._audit(scope, lookup, best)
        threshold = machine.threshold
        is_served = best is not None and score is not None and threshold is not None and score >= threshold
        is_served = is_served and has_capacity
        self._note(machine, lookup.context, found)
        scope.tally += LookupTally(lookups=1)
        if best is None or not is_served:
            return None
        lookup.served = best
        lookup.context.priority = lookup.flow.priority
        return best.answer

    def count_served(self, lookup: SemanticLookup) -> None:
        """Counts the answer that a look-up has found, and notes it in the context: its request is admitted."""
        served, scope, noted = lookup.served, self._scopes.get(lookup.question.scope), lookup.context.cache
        assert served is not None
        assert noted is not None
        lookup.context.cache = replace(
            noted,
            status=CacheStatus.SEMANTIC,
            key=served.key.name,
            age_s=served.age_s,
            similarity=served.question.cosine,
        )
        if scope is None:
            return
        scope.tally += LookupTally(served=1, saved_tokens=served.answer.usage.total_tokens)
        self._encoder.update(UpdateSimilar(served=[served.question.key]))

    def keep(self, question: UserQuestion, digest: bytes, regions: frozenset[str] | None = None) -> None:
        """Adds a question to the index, whose answer is in the cache now, if the encoder may read it.

        Args:
            question: The question.
            digest: Key of its answer.
            regions: Regions in which its request may be computed; None: in all regions.
        """
        if not self._encoder.may_read(regions):
            return
        self._encoder.update(UpdateSimilar(kept=[KeptQuestion(question.partition, question.text, digest)]))

    async def _search(self, lookup: SemanticLookup) -> SimilarQuestions | None:
        """Searches for similar questions; None: the question is too long for the encoder, or may not go there.

        Raises:
            MaitredError: The encoder is down.
        """
        question = lookup.question
        if not self._encoder.may_read(lookup.regions):
            return None
        tokens = self._encoder.tokens_of(question.text)
        if tokens is None:
            return None
        search = SimilarSearch(
            question.text, question.partition, question.scope, count=_CANDIDATES, least_cosine=LEAST_COSINE
        )
        return await self._encoder.search(
            search, tokens, lookup.flow, lookup.principal.tenants[-1], regions=lookup.regions
        )

    async def _best(
        self, found: Sequence[SimilarQuestion], lookup: SemanticLookup
    ) -> tuple[SimilarAnswer | None, bool]:
        """Returns the answer of the found question that most probably is an answer to this one; None: there is none.

        Returns:
            The answer, and whether it is known what would be found: if answers are gone, or their Redis is away, it is
            not, and such a look-up is no trial.
        """
        assert lookup.context.request is not None
        asked = lookup.question.wording
        max_age_s = lookup.context.request.cache.max_age_s
        candidates = [each for each in found if difference(asked, Wording.of(each.question)) is None]
        candidates.sort(key=lambda each: each.cosine if each.score is None else each.score, reverse=True)
        is_known = True
        for candidate in candidates:
            key = replace(lookup.answers.key, digest=candidate.key)
            kept = await self._answers.find(key)
            if kept is None or not lookup.answers.is_of_server(kept[0]):
                is_known = False
                self._encoder.update(UpdateSimilar(removed=[candidate.key]))
            elif max_age_s is None or kept[1] <= max_age_s:
                return SimilarAnswer(*kept, key, candidate), True
        return None, is_known

    def _audit(self, scope: _Scope, lookup: SemanticLookup, best: SimilarAnswer | None) -> None:
        """Lets a look-up be recorded: what its phase wants to know of it."""
        machine, model = scope.machine, lookup.question.model
        attempt, score = machine.attempt, None if best is None else best.question.score
        audited = None if best is None else AuditedAnswer(best.answer.deltas, lookup.own_answer, lookup.compute_copy)
        match machine.phase:
            case ScopePhase.LEARNING if best is not None and machine.wants_label(best.question.cosine):
                found, asked = best.question, lookup.question.text
                regions = self._encoder.regions_of_label(lookup.regions)

                def record_label(is_same: bool) -> None:
                    pair = LabelledPair(asked, found.question, is_same, found.surroundings, regions=regions)
                    scope.outcomes.append(LookupLabel(pair, attempt))
                    self._labels[model, is_same] += 1

                self.audits.add(lookup.question.scope, record_label, audited)
            case ScopePhase.SCORING if scope.searches >= _WARM_SEARCHES:
                scope.outcomes.append(LookupScore(score, attempt))
            case ScopePhase.CERTIFYING | ScopePhase.CERTIFIED:
                loosest = machine.loosest
                if score is None or loosest is None or score < loosest:
                    score, audited = None, None
                would_serve = score is not None and machine.threshold is not None and score >= machine.threshold

                def record_trial(is_same: bool) -> None:
                    scope.outcomes.append(LookupTrial(score, not is_same, attempt))
                    self._results[model, "none" if audited is None else "same" if is_same else "false"] += 1
                    self._false_hits[model] += would_serve and not is_same

                self.audits.add(lookup.question.scope, record_trial, audited)

    def _note(self, machine: SemanticScope, context: RequestContext, found: SimilarQuestions | None) -> None:
        """Writes into the context of a request what was found; whether it is served is known when it is admitted."""
        key = "" if context.cache is None else context.cache.key
        nearest = found.found[0].cosine if found is not None and found.found else None
        context.cache = CacheResult(
            CacheStatus.MISS,
            key,
            semantic_state=machine.state,
            similarity=nearest,
            false_hit_bound=machine.bound if machine.bound < 1.0 else None,
        )

    # --- the database ---

    async def _load(self, name: str) -> None:
        """Loads a scope from the database.

        Raises:
            MaitredError: The encoder is down, or the database is away.
        """
        encoder = self._encoder.version
        record = await self._store.load(name, encoder)
        if record is None:
            record = await self._store.change(name, encoder, lambda new: (new, ()))
        scope = self._scopes.get(name)
        if scope is None:
            scope = self._scopes[name] = _Scope(SemanticScope(record, self._answers.config.semantic))
            while len(self._scopes) > _MOST_SCOPES:
                self._scopes.popitem(last=False)
        await self._set_record(name, scope, record)

    async def _set_record(self, name: str, scope: _Scope, record: ScopeRecord) -> None:
        """Goes on with a state from the database, and with its verifier.

        Raises:
            StoreUnavailable: The database is away.
        """
        before, version = scope.machine, record.verifier
        if version != scope.version:
            scope.weights = (version and await self._store.weights(name, record.encoder, version)) or b""
            scope.version, scope.send_at_s = version, 0.0
        machine = scope.machine = SemanticScope(record, self._answers.config.semantic)  # settings of now
        if machine.state is not before.state:
            _log.info("The semantic cache of %s is %s now.", name, machine.state)

    async def _check_changes(self) -> None:
        """Loads the scopes again that others have changed, and drops those that they have removed."""
        now_s = self._clock.monotonic_s()
        if now_s < self._check_at_s:
            return
        encoder, names = self._encoder.version, [*self._scopes]
        changes = await self._store.last_changes(names, encoder)
        for name in names:
            scope = self._scopes.get(name)
            if scope is None or changes.get(name) == scope.changed_s:
                continue
            if name in changes:
                await self._load(name)
                scope.changed_s = changes[name]
            else:
                del self._scopes[name]
        self._check_at_s = now_s + _CHECK_EVERY_S

    async def _store_outcomes(self, name: str, scope: _Scope) -> None:
        encoder, settings = self._encoder.version, self._answers.config.semantic
        outcomes, scope.outcomes = scope.outcomes, []
        tally, scope.tally = scope.tally, LookupTally()
        change = partial(apply_outcomes, outcomes=[*outcomes, tally], settings=settings)
        try:
            record = await self._store.change(name, encoder, change)
        except BaseException:
            scope.outcomes = outcomes + scope.outcomes
            scope.tally += tally
            raise
        await self._set_record(name, scope, record)

    def _train_if_due(self, name: str, scope: _Scope) -> None:
        is_due = scope.machine.phase is ScopePhase.TRAINING and scope.train_at_s <= self._clock.monotonic_s()
        if is_due and self._tasks is not None:
            scope.train_at_s = math.inf
            self._tasks.create_task(self._train(name, scope), name=f"training for {name}")

    async def _train(self, name: str, scope: _Scope) -> None:
        """Trains the verifier of a scope and stores it, unless another gateway does."""
        # A scope that begins anew meanwhile gets nothing of what it had before.
        attempt, encoder = scope.machine.attempt, scope.machine.record.encoder
        try:
            if not await self._store.claim_training(name, encoder, attempt, _TRAINING_LEASE_S):
                return
            labels = await self._store.labels(name, encoder, self._answers.config.semantic.training_labels)
            readable = [label for label in labels if self._encoder.may_learn_from(label)]
            weights = await self._encoder.train(readable)
            if self._encoder.version != encoder:
                return  # it is another one, which had begun before the training did
            if weights:
                await self._store.set_verifier(name, encoder, attempt, _digest_of(weights), weights)
                await self._load(name)
            elif len(readable) < len(labels):
                _log.warning("No verifier can be trained for %s here: most of its labels stay in other regions.", name)
            else:
                await self._store.give_up_training(name, encoder, attempt)
                _log.warning(
                    "No verifier can be trained for %s: its labels are all the same. Raise "
                    "cache.semantic.training_labels, so that more are compared; or reset the scope.",
                    name,
                )
        except MaitredError as failure:
            _log.warning("The verifier for %s could not be trained: %s", name, failure.message)
        finally:
            scope.train_at_s = self._clock.monotonic_s() + _TRAIN_AGAIN_S


def _digest_of(weights: bytes) -> str:
    return hashlib.sha256(weights).hexdigest()[:_VERSION_DIGITS]


def _version_of(verifier: str) -> str:
    return verifier.rpartition(":")[2]
