"""Answers without computing: from the cache, or from an equal request whose answer is being computed.

::

    being computed for another? --yes--> join it: what there is of it, then what comes
      no
    in the cache? --yes--> all of it
      no
    compute it, for all who ask meanwhile, and keep it

Whoever gets an answer that was not computed for it has a reservation and a line in the ledger of its own.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import NamedTuple, Protocol

from maitred.app.request.answer_lookup import AnswerLookup
from maitred.app.request.coalescing import CoalescedAnswer, CoalescedResponse, Compute, PeerLost
from maitred.app.request.flow_control import GrantHandle
from maitred.app.request.peer_answer import PeerAnswer
from maitred.app.semantic.cache import SemanticCache
from maitred.cache.answer import CachedAnswer
from maitred.cache.answer_cache import AnswerCache
from maitred.core.context import CacheStatus, Outcome, RequestContext
from maitred.core.errors import CachedAnswerTooLong, MaitredError
from maitred.core.inference import TextDelta
from maitred.core.resource_stack import ResourceStack
from maitred.core.service import PushStream, ResponseStream, StreamSink

_MOST_LOOK_UPS = 2
"""Look-ups of one request. The second one follows where a peer has ended an answer before it could be read."""
_MOST_RECOVERIES = 8
"""How often an answer is read from another process again before each process computes it."""

Admit = Callable[[str, int, bytes, ResourceStack], Awaitable[GrantHandle]]
"""Admits a request whose answer is not computed for it; the stack owns the grant. The others are `cache`,
`cached_tokens` and `bill` of `AdmissionRequest`."""


class AnswerPeers(Protocol):
    """The other processes of this gateway, which compute answers that this one can read."""

    async def claim(self, digest: bytes) -> "ClaimResult":
        """Claims the answer to a request for this process, unless another one computes it.

        The claim lasts until `release`, also where the call is cancelled.
        """
        ...

    def release(self, digest: bytes) -> None:
        """Notes that this process does not compute the answer any more; does nothing if another one does."""
        ...

    async def wait_connected(self) -> None:
        """Waits until claims can be made again, for some seconds at most."""
        ...


class ClaimResult(NamedTuple):
    """Result of a claim."""

    remote: PeerAnswer | None = None
    """The answer, if another process computes it; None: this process does."""
    may_be_stored: bool = False
    """Whether another process has just computed it, so that it may be in the cache now."""


class AnswerSharing:
    """Shares answers among the requests of one process, and with those of its peers.

    Args:
        cache: Cache of complete answers.
        peers: The other processes of this gateway; None: there are none.
        semantic: Answers of similar questions; None: a question is answered by its own answer only.

    Attributes:
        semantic: See above.
    """

    def __init__(
        self, cache: AnswerCache, peers: AnswerPeers | None = None, semantic: SemanticCache | None = None
    ) -> None:
        self.cache = cache
        self.semantic = semantic
        self._peers = peers
        self._coalesced: dict[tuple[bytes, bool], CoalescedAnswer] = {}
        """Digest of a request, and whether its answer comes in one piece -> the answer that is being computed."""
        self._claims: Counter[bytes] = Counter()
        """Digest of a request -> number of requests that have claimed its answer among the processes."""

    @property
    def coalesced_count(self) -> int:
        """Number of answers that are being computed and can be shared."""
        return len(self._coalesced)

    def find(self, digest: bytes) -> CoalescedAnswer | None:
        """Returns the answer to a request that a peer can read; None: there is none."""
        answer = self._coalesced.get((digest, False))
        return answer if answer is not None and answer.can_be_joined else None

    async def respond(
        self, lookup: AnswerLookup, context: RequestContext, admit: Admit, compute: Compute, stack: ResourceStack
    ) -> ResponseStream:
        """Returns the response to a request.

        Args:
            lookup: Look-up of the request in the cache.
            context: Record of the request.
            admit: Admits the request if its answer is not computed for it.
            compute: Computes the answer; its stack owns what the computation holds.
            stack: Owns what the request holds.

        Raises:
            MaitredError: The request is rejected.
        """
        claims: list[bytes] = []
        try:
            for _ in range(_MOST_LOOK_UPS):
                answer, is_remote = await self._look_up(lookup, context, claims)
                while answer is None and (shared := self._find(lookup)) is not None:
                    response = await self._join(shared, lookup, context, admit, compute, stack)
                    if response is not None:
                        return response
                if answer is not None or not is_remote:
                    break  # else the peer has ended it meanwhile, and it may be in the cache
            if answer is not None:
                context.priority = lookup.priority
                found, context.cache = context.cache, None  # who is refused has got nothing from the cache
                try:
                    response = await _respond_cached(answer, lookup, context, admit, stack)
                except CachedAnswerTooLong:
                    lookup.is_shared = False  # another caller's limits allow what those of this one do not
                else:
                    context.cache = found
                    return response
            lookup.note(CacheStatus.MISS, context)
            held, claims = claims, []
            coalesced = CoalescedAnswer(context, lookup.record(), lookup.choices)
            reader = stack.push_async_exit(CoalescedResponse(coalesced, context, lookup, compute))
            if lookup.question is not None and self.semantic is not None:
                compute = partial(_respond_similar, self.semantic, lookup, context, admit, compute)
            coalesced.start(compute, self._add(lookup, coalesced, held), partial(self._recover, lookup, held))
        finally:
            self._release(claims)
        await reader.wait_started()
        return reader

    async def _look_up(
        self, lookup: AnswerLookup, context: RequestContext, claims: list[bytes]
    ) -> tuple[CachedAnswer | None, bool]:
        """Looks for the answer in the cache, and then among the peers.

        Args:
            lookup: Look-up of the request.
            context: Record of the request.
            claims: Gets the digest of the answer when it is claimed.

        Returns:
            The answer from the cache, or None; and whether a peer computes it, so that it can be joined here.
        """
        if self._find(lookup) is not None:
            return None, False
        answer = await lookup.find(context)
        if answer is not None or self._peers is None or not lookup.is_shared or lookup.in_one_piece:
            return answer, False
        if self._find(lookup) is not None:
            return None, False
        answer, remote = await self._claim(self._peers, lookup, context, claims)
        if remote is not None:
            self._read_remote(remote, lookup, context)
            return None, True
        return answer, False

    async def _claim(
        self, peers: AnswerPeers, lookup: AnswerLookup, context: RequestContext, claims: list[bytes]
    ) -> tuple[CachedAnswer | None, PeerAnswer | None]:
        """Claims an answer among the processes; `claims` gets its digest.

        Returns:
            The answer from the cache, or that of a peer which computes it; twice None: it is to be computed here.
        """
        self._claims[lookup.digest] += 1
        claims.append(lookup.digest)
        remote, may_be_stored = await peers.claim(lookup.digest)
        answer = None
        if remote is None and may_be_stored and (answer := await lookup.find(context)) is not None:
            self._release(claims)
        return answer, remote

    def _read_remote(self, remote: PeerAnswer, lookup: AnswerLookup, context: RequestContext) -> None:
        """Begins to read an answer that another process computes, for all who ask for it here."""
        if self._find(lookup) is not None:
            remote.leave()  # it was begun meanwhile
            return
        state, claims = RequestContext(context.request_id, context.started_s), list[bytes]()
        coalesced = CoalescedAnswer(state, lookup.record(), lookup.choices, is_remote=True)
        recover = partial(self._recover, lookup, claims)
        coalesced.start(partial(remote.read, state), self._add(lookup, coalesced, claims), recover)

    async def _recover(
        self, lookup: AnswerLookup, claims: list[bytes], answer: CoalescedAnswer, lost: MaitredError
    ) -> Compute:
        """Returns what goes on with an answer whose computation is lost while callers read it here.

        Where the process that computed it is lost, the cache or another process may have it by now, and else this
        process computes it for the next of its callers. It does so, too, where the first caller may not go on.

        Args:
            lookup: Look-up of the request.
            claims: Claims on the answer, which are released; gets the next one.
            answer: The answer.
            lost: Why it is lost.
        """
        if not isinstance(lost, PeerLost) or self._peers is None:
            answer.fail_first(lost)
            return answer.compute_for_next
        self._release(claims)
        await self._peers.wait_connected()
        state = RequestContext(answer.context.request_id, answer.context.started_s)
        if answer.recoveries < _MOST_RECOVERIES:
            stored, remote = await lookup.find(state), None
            if stored is None:
                stored, remote = await self._claim(self._peers, lookup, state, claims)
            if stored is not None or remote is not None:
                answer.next_context = state
            if stored is not None:
                return partial(_replay, stored, lookup, state)
            if remote is not None:
                return partial(remote.read, state)
        return answer.compute_for_next

    async def _join(
        self,
        coalesced: CoalescedAnswer,
        lookup: AnswerLookup,
        context: RequestContext,
        admit: Admit,
        compute: Compute,
        stack: ResourceStack,
    ) -> ResponseStream | None:
        """Joins an answer that is being computed; None: this request cannot, and computes its own or asks again."""
        try:
            async with ResourceStack() as joined:
                reader = joined.push_async_exit(CoalescedResponse(coalesced, context, lookup, compute))
                try:
                    await reader.wait_started()
                except MaitredError:
                    return None  # what was refused to the first caller may be granted to this one
                priority, first_priority = lookup.priority, coalesced.context.priority
                if not coalesced.has_begun and first_priority is not None and priority.rank < first_priority.rank:
                    lookup.is_shared = False  # it would wait behind others that it stands before
                    return None
                if not coalesced.can_be_joined:
                    return None
                context.priority = priority
                bill = b"" if coalesced.is_complete else lookup.bill  # that is divided already
                try:
                    reader.grant = await admit("coalesced", lookup.most_tokens, bill, joined)
                except CachedAnswerTooLong:
                    lookup.is_shared = False
                    return None
                if coalesced.is_lost:
                    context.is_counted = True  # the rates of requests have it
                    raise PeerLost
                lookup.note(CacheStatus.COALESCED, context)
                stack.push_async_exit(joined.pop_all())
                return reader
        except PeerLost:
            return None  # it was lost while this caller, who has nothing of it yet, was admitted

    def _find(self, lookup: AnswerLookup) -> CoalescedAnswer | None:
        """Returns the answer to a request that a new reader can get; None: there is none, or it is not shared.

        A stream does not wait for an answer that comes in one piece.
        """
        if not lookup.is_shared:
            return None
        for in_one_piece in (False, True)[: 1 + lookup.in_one_piece]:
            answer = self._coalesced.get((lookup.digest, in_one_piece))
            if answer is not None and answer.can_be_joined:
                return answer
        return None

    def _add(self, lookup: AnswerLookup, answer: CoalescedAnswer, claims: list[bytes]) -> Callable[[object], None]:
        """Adds an answer that new readers can get, if it is shared; returns the function that removes it.

        Args:
            lookup: Look-up of its request.
            answer: The answer.
            claims: Claims on it, which the removal releases.
        """
        place = lookup.digest, lookup.in_one_piece
        if lookup.is_shared:
            self._coalesced[place] = answer

        def remove(_: object) -> None:
            if self._coalesced.get(place) is answer:
                del self._coalesced[place]
            self._release(claims)

        return remove

    def _release(self, claims: list[bytes]) -> None:
        """Releases claims of one request; behind the last one on an answer, a peer may compute the next one."""
        while claims:
            digest = claims.pop()
            self._claims[digest] -= 1
            if not self._claims[digest]:
                del self._claims[digest]
                assert self._peers is not None
                self._peers.release(digest)


async def _respond_cached(
    answer: CachedAnswer,
    lookup: AnswerLookup,
    context: RequestContext,
    admit: Admit,
    stack: ResourceStack,
    cache: str = "exact",
) -> ResponseStream:
    """Admits a request whose answer is in the cache, and returns its response."""
    grant = await admit(cache, answer.usage.completion_tokens, b"", stack)
    lookup.restore(answer, context)
    return CachedResponse(answer, grant, context)


async def _respond_similar(
    semantic: SemanticCache,
    lookup: AnswerLookup,
    context: RequestContext,
    admit: Admit,
    compute: Compute,
    stack: ResourceStack,
) -> ResponseStream:
    """Returns the answer of a similar question, if one may be served, and else computes the request's own."""
    # The first on the stack, it is left last: the recording of the answer is over then.
    similar = stack.push_async_exit(semantic.look_up(lookup, context))
    answer = await similar.find()
    if answer is not None:
        try:
            response = await _respond_cached(answer, lookup, context, admit, stack, "semantic")
        except CachedAnswerTooLong:
            pass  # its own is within its limits
        else:
            similar.on_admitted()
            return response
    return await compute(stack)


async def _replay(
    answer: CachedAnswer, lookup: AnswerLookup, context: RequestContext, stack: ResourceStack
) -> ResponseStream:
    """Returns an answer from the cache in place of a computation; nothing is held for it."""
    lookup.restore(answer, context)
    return _one_batch(answer.deltas)


async def _one_batch(deltas: list[TextDelta]) -> AsyncIterator[list[TextDelta]]:
    yield deltas


class CachedResponse(PushStream):
    """Response that an earlier request has computed. Implements `maitred.core.service.ResponseStream`.

    Args:
        answer: The answer.
        grant: The reservation of the request.
        context: Record of the request, with the usage of the answer.
    """

    def __init__(self, answer: CachedAnswer, grant: GrantHandle, context: RequestContext) -> None:
        self._answer: CachedAnswer | None = answer
        self._grant = grant
        self._context = context

    def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        return self

    async def __anext__(self) -> list[TextDelta]:
        answer, self._answer = self._answer, None
        if answer is None:
            raise StopAsyncIteration
        await self._grant.settle(self._context.usage, Outcome.FINISHED)
        return answer.deltas

    def push_to(self, sink: StreamSink) -> None:
        """Does nothing, because the reader gets the whole answer; implements `PushStream.push_to`."""
