"""One request of a worker's, as the controller sees it: what `Pipeline` does around an answer, without the answer.

It may have begun under another controller, and goes on with this one where it was.

It runs as a task that holds what the request holds, in the same contexts and in the same order as in one process. So
whatever ends it, also the death of the worker, gives everything back in the same way.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from maitred.admission.grant import Grant
from maitred.admission.request import AdmissionRequest
from maitred.api.in_flight import ClientDisconnected, InFlightLimiter, InFlightSlot
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.request.resources import ResourceStack
from maitred.app.request.upstream_plan import TruncatedPrompt
from maitred.core.answer import RequestContext
from maitred.core.clock import Clock
from maitred.core.errors import Bug, MaitredError, ReplicaUnavailable
from maitred.core.tenancy import ANONYMOUS
from maitred.core.timeline import TimelineSpan
from maitred.dispatch.dispatcher import DispatchEntry
from maitred.dispatch.request import AnyEndpoint, DispatchRequest
from maitred.replica.health.breaker import AttemptOutcome, BreakerAttempt
from maitred.wire.error_codec import read_error, write_error
from maitred.wire.worker_protocol import (
    AdmitAccepted,
    AdmitRejected,
    AdmitRequest,
    AttemptResult,
    Dispatched,
    PromptSummary,
    ReleaseRequest,
    ReplicaFailed,
    ResumeGrant,
    SettleReply,
    SettleRequest,
    TokensUsed,
    ToWorker,
)

if TYPE_CHECKING:
    from maitred.replica.upstream.replica import UpstreamReplica

_OUTCOMES = {
    AttemptResult.SUCCESS: AttemptOutcome.SUCCESS,
    AttemptResult.FAILURE: AttemptOutcome.FAILURE,
    AttemptResult.AWAY: AttemptOutcome.FAILURE,
}
Order = ReplicaFailed | SettleRequest | ReleaseRequest


class RemoteRequest:
    """Made for every `AdmitRequest`.

    Args:
        asks: What the worker asks.
        control: Decides.
        gate: Counts it among those who are inside.
        clock: For its story.
        tell: Sends the worker something.
        resumes: What another controller had granted, which is dead; None: it comes only now.

    Attributes:
        asks: What the worker asks.
        resumed: Whether it has again what it had; None: it had nothing.
    """

    def __init__(
        self,
        asks: AdmitRequest,
        control: LocalFlowController,
        gate: InFlightLimiter,
        clock: Clock,
        tell: Callable[[ToWorker], None],
        resumes: ResumeGrant | None = None,
    ) -> None:
        self.asks = asks
        self.resumed = None if resumes is None else asyncio.Event()
        self._resumes = resumes
        # There is one whom nobody can shut out, and who is known by being that object.
        self._principal = ANONYMOUS if asks.principal == ANONYMOUS else asks.principal
        self._control = control
        self._gate = gate
        self._clock = clock
        self._tell = tell
        self._orders: deque[Order] = deque()
        self._ordered: asyncio.Future[None] | None = None
        """Of whoever waits for one of them."""
        self._visit: InFlightSlot | None = None
        self._seat: DispatchEntry | None = None
        self._released = False
        """Whether it reads orders."""
        self._gone = False
        self._attempt: tuple[UpstreamReplica, BreakerAttempt] | None = None
        self.tally = RequestContext(
            asks.request_id,
            asks.arrived_s,
            asks.route,
            self._principal,
            asks.model,
            priority=asks.flow.priority,
            prompt_tokens=sum(prompt.tokens for prompt in asks.prompts),
        )

    @property
    def chapters(self) -> list[TimelineSpan]:
        """What is told of it here."""
        return self.tally.story.chapters

    # --- what the worker says ---

    def took(self, took: TokensUsed) -> None:
        """Tokens came."""
        tally = self.tally
        tally.cached_tokens += took.cached_tokens
        tally.completion_tokens += took.output_tokens
        if self._seat is None:
            return
        if took.first:
            tally.first_token_s = self._clock.monotonic_s()
            self._seat.first_token()
            if self._attempt is not None:
                upstream, attempt = self._attempt
                upstream.standing.answered(attempt)
        self._seat.took(
            prompt_tokens=took.prompt_tokens, cached_tokens=took.cached_tokens, output_tokens=took.output_tokens
        )

    def heard(self) -> None:
        """Its engine says that it has the next of its prompts, so that its reports count it."""
        if self._seat is not None:
            self._seat.submitted()

    def order(self, order: Order) -> None:
        """It is to be settled, to wait for another replica, or to end."""
        if self._released or not isinstance(order, ReleaseRequest):
            self._orders.append(order)
            if self._ordered is not None and not self._ordered.done():
                self._ordered.set_result(None)
        elif self._visit is None:
            self._gone = True
        else:
            self._visit.interrupt(ClientDisconnected() if order.error is None else read_error(order.error))

    # --- its way ---

    async def run(self) -> None:
        """From the question to the end. Raises nothing but what cancels it."""
        number = self.asks.number
        if self._gone:
            return
        resumes = self._resumes
        try:
            with self._gate.enter(self._principal, even_if_full=resumes is not None) as self._visit:
                if self.asks.pool not in self._control.pools:
                    raise ReplicaUnavailable(retry_after_s=1.0)  # the worker knows a configuration that is over
                await (self._serve() if resumes is None else self._go_on(resumes))
        except ClientDisconnected:
            pass
        except MaitredError as error:
            self._tell(AdmitRejected(number, write_error(error), self.tally.standing))
        except Exception:
            self._tell(AdmitRejected(number, write_error(Bug()), self.tally.standing))
            raise

    async def _serve(self) -> None:
        asks, tally = self.asks, self.tally
        errand = self._errand(asks.length)
        tally.forecast = place = self._control.check(asks.pool, errand)
        admit = partial(self._control.admit, asks.pool, errand, self._work(), tally.story)
        async with ResourceStack(admit) as (grant, seat):
            self._seat = seat
            self._tell(
                AdmitAccepted(
                    *(asks.number, grant.lease, grant.max_tokens, grant.clamped, tally.standing, place),
                    seat.expected_tokens,
                )
            )
            try:
                while await self._at_a_replica(grant, seat):
                    pass
            finally:
                self._end_attempt(AttemptResult.NEITHER)

    async def _go_on(self, resumes: ResumeGrant) -> None:
        """What another controller had granted is held by this one, and the request is where it was."""
        pool, held = self.asks.pool, (resumes.lease, resumes.replica)
        self._note(resumes)
        resume = partial(self._control.resume, pool, self._errand(resumes.max_tokens), self._work(), *held)
        async with ResourceStack(resume) as (grant, seat):
            self._seat, again = seat, not resumes.replica
            self._released = not again
            if self.resumed is not None:
                self.resumed.set()
            try:
                if not again:
                    await self._take_up(resumes, grant, seat)
                    again = await self._obey(grant, seat)
                while again and seat is not None:
                    again = await self._at_a_replica(grant, seat)
            finally:
                self._end_attempt(AttemptResult.NEITHER)

    async def _take_up(self, resumes: ResumeGrant, grant: Grant, seat: DispatchEntry | None) -> None:
        """It runs at its replica, and has got something there, or nothing yet."""
        grant.served_by(resumes.replica)
        if seat is None:
            return
        with suppress(ReplicaUnavailable):
            self._begin_attempt(await seat.granted())
        if resumes.first_token_s is not None:
            seat.took(prompt_tokens=resumes.usage.prompt_tokens, cached_tokens=resumes.usage.cached_tokens)

    async def _at_a_replica(self, grant: Grant, seat: DispatchEntry) -> bool:
        """Waits for its turn, and for what becomes of it there; returns whether it waits for another turn."""
        self._released = False
        post = await seat.granted()
        self._released = True
        try:
            self._begin_attempt(post)
        except ReplicaUnavailable:
            if seat.again(prompts=range(len(self.asks.prompts))):
                return True
            raise
        grant.served_by(post.name)
        self._tell(Dispatched(self.asks.number, post.name, seat.waited_ms, seat.elsewhere))
        return await self._obey(grant, seat)

    async def _obey(self, grant: Grant, seat: DispatchEntry | None) -> bool:
        """Does what the worker says of it while it runs; returns whether it waits for another turn."""
        number = self.asks.number
        while True:
            match await self._next_order():
                case ReplicaFailed() as order:
                    self._end_attempt(order.met)
                    if seat is None or not seat.again(
                        prompts=order.prompts, answer_by_s=order.answer_by_s, rest_s=order.rest_s
                    ):
                        raise ReplicaUnavailable
                    return True
                case SettleRequest() as order:
                    self._note(order)
                    self._end_attempt(AttemptResult.SUCCESS)
                    try:
                        await grant.settle(order.usage, order.outcome)
                    except MaitredError as error:
                        self._tell(SettleReply(number, write_error(error)))
                    else:
                        # Nothing comes of it any more, so its worker need not say that it leaves.
                        self._tell(SettleReply(number))
                        return False
                case ReleaseRequest() as order:
                    self._note(order)
                    grant.used(order.usage)
                    self._end_attempt(order.met)
                    if order.cancelled and self._visit is not None:
                        # As in one process, where the caller's leaving cancels: what came of the answer is billed.
                        self._visit.interrupt(ClientDisconnected())
                        await asyncio.sleep(0)
                    if order.error is not None:
                        raise read_error(order.error)
                    return False

    async def _next_order(self) -> Order:
        while not self._orders:
            self._ordered = asyncio.get_running_loop().create_future()
            await self._ordered
        return self._orders.popleft()

    def _note(self, order: SettleRequest | ReleaseRequest | ResumeGrant) -> None:
        """What the worker knows better: it has seen every token."""
        tally, usage = self.tally, order.usage
        tally.prompt_tokens, tally.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        tally.completion_tokens, tally.first_token_s = usage.completion_tokens, order.first_token_s

    def _begin_attempt(self, post: AnyEndpoint) -> None:
        if post.exact:
            return  # an engine of ours: it says itself how it does
        upstream: UpstreamReplica = post.replica
        self._attempt = upstream, upstream.standing.begin()
        upstream.open_streams += 1

    def _end_attempt(self, met: AttemptResult) -> None:
        if self._attempt is None:
            return
        (upstream, attempt), self._attempt = self._attempt, None
        upstream.open_streams -= 1
        upstream.standing.ended(attempt, _OUTCOMES.get(met, AttemptOutcome.NEITHER))
        if met is AttemptResult.AWAY:
            upstream.standing.missed("a worker could not reach it")

    # --- as others see it ---

    def _errand(self, max_tokens: int) -> DispatchRequest:
        asks = self.asks
        return DispatchRequest(
            id=asks.request_id,
            principal_org=self._principal.tenants[-1],
            flow=asks.flow,
            prompt_tokens=sum(prompt.tokens for prompt in asks.prompts),
            prompts=[_prompt_of(written) for written in asks.prompts],
            max_tokens=max_tokens,
            choices=asks.choices,
            arrived_s=asks.arrived_s,
            deadline_s=asks.deadline_s,
            session=asks.session,
            story=self.tally.story,
        )

    def _work(self) -> AdmissionRequest:
        asks = self.asks
        return AdmissionRequest(
            principal=self._principal,
            request_id=asks.request_id,
            route=asks.route,
            model=asks.model,
            prompt_tokens=self.tally.prompt_tokens,
            longest_prompt=max(prompt.tokens for prompt in asks.prompts),
            max_tokens=asks.max_tokens,
            min_tokens=asks.min_tokens,
            window_left=asks.window_left,
            choices=asks.choices,
            max_tokens_param=asks.max_tokens_param,
            prompt_param=asks.prompt_param,
            tally=self.tally,
        )


def _prompt_of(written: PromptSummary) -> Sequence[int]:
    return written.ids if len(written.ids) == written.tokens else TruncatedPrompt(written.ids, written.tokens)
