"""`Control` for a worker: one question for each request, over the line to the controller."""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from types import TracebackType

from msgspec.structs import replace

from maitred.admission.config import AdmissionConfig
from maitred.admission.prices import PriceList
from maitred.admission.request import AdmissionRequest
from maitred.api.in_flight import CancelScope
from maitred.app.request.resources import Holder
from maitred.app.workers.client import ControllerClient
from maitred.core.answer import Outcome, RateLimitStatus
from maitred.core.errors import Bug, MaitredError, Overloaded, Unavailable
from maitred.core.flow import QueuePosition
from maitred.core.money import Price
from maitred.core.request import Usage
from maitred.core.tenancy import Principal
from maitred.core.timeline import RequestTimeline
from maitred.dispatch.dispatcher import HedgeAllocation
from maitred.dispatch.request import AnyEndpoint, DispatchRequest
from maitred.replica.engine.client import EngineClient
from maitred.replica.health.breaker import AttemptOutcome, BreakerAttempt
from maitred.replica.upstream.status import UpstreamStatus
from maitred.wire.error_codec import read_error, write_error
from maitred.wire.worker_protocol import (
    AdmitAccepted,
    AdmitRejected,
    AdmitRequest,
    AttemptResult,
    Dispatched,
    PromptSummary,
    RateLimitQuery,
    RateLimitReply,
    ReleaseRequest,
    ReplicaFailed,
    ResumeGrant,
    SettleReply,
    SettleRequest,
    SubmissionAcked,
    TokensUsed,
    ToWorker,
)


class SubmissionTracker:
    """To one engine. Submissions are heard in the order in which they were sent.

    Args:
        engine: Which.
        line: To the controller.
    """

    def __init__(self, engine: EngineClient, line: ControllerClient) -> None:
        self._engine = engine
        self._line = line
        self._sent: deque[int] = deque()
        self._reported = asyncio.Event()
        engine.watch(self._look)

    def sent(self, number: int) -> None:
        """A prompt of the request of this number was sent."""
        self._sent.append(number)

    @property
    def met(self) -> bool:
        """Whether there is a line to it. There is none yet where it, or this worker, has just been started."""
        return self._engine.ready

    async def meet(self) -> None:
        """Waits for that for a moment."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                while not self.met:
                    self._reported.clear()
                    await self._reported.wait()

    def _look(self) -> None:
        """The engine has reported."""
        self._reported.set()
        while len(self._sent) > self._engine.unheard():
            self._line.tell(SubmissionAcked(self._sent.popleft()))


class RemoteDispatch:
    """A grant and a queue entry that the controller holds for this worker; leaving the context releases both.

    Implements `maitred.app.request.flow_control.GrantHandle` and `DispatchHandle`.

    Args:
        line: To the controller.
        posts: The replicas of the model, by name...
        submissions: ...and what was sent to those of them that are engines of ours.
        block: What ends when the controller ends the request: this context.
        work: The request, with its tally.
        recoveries: How often it may wait for another replica.

    Attributes:
        met: What its attempt says of the server that it is at.
    """

    def __init__(
        self,
        line: ControllerClient,
        posts: Mapping[str, AnyEndpoint],
        submissions: Mapping[str, SubmissionTracker],
        block: CancelScope,
        work: AdmissionRequest,
        recoveries: int,
    ) -> None:
        assert work.tally is not None
        self._line = line
        self._posts = posts
        self._submissions = submissions
        self._tally = work.tally
        self._block = block
        self._recoveries = recoveries
        self._number = line.enter(self)
        self._asks: AdmitRequest | None = None
        self._seated: AdmitAccepted | None = None
        self._released: Dispatched | None = None
        self._settles: SettleRequest | None = None
        self._settled: SettleReply | None = None
        self._error: MaitredError | None = None
        """What stands against it, until it is raised."""
        self._waiter: asyncio.Future[None] | None = None
        """Of whoever waits for what is said next."""
        self._returns = 0
        self._over = False
        self._cut_off = False
        """Whether the controller that had granted it is gone, and no other has been told of it."""
        self._taken = _NOTHING
        """Tokens of which the controller has not been told..."""
        self._first = False
        """...and whether its very first is among them."""
        self.met = AttemptResult.NEITHER

    async def take(self, asks: AdmitRequest) -> None:
        """Asks for it; raises what stands against it. A controller that dies meanwhile has granted nothing."""
        self._asks = asks
        while self._seated is None:
            await self._line.ready()
            self._cut_off = False
            self._line.tell(asks)
            while self._seated is None and not self._cut_off:
                await self._news()
        tally, seated = self._tally, self._seated
        tally.standing, tally.forecast = seated.standing, seated.place
        tally.clamped_max_tokens = seated.max_tokens if seated.clamped else None

    @property
    def number(self) -> int:
        """Under which the controller knows it."""
        return self._number

    async def __aenter__(self) -> "RemoteDispatch":
        self._block.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._leave(error)
        finally:
            self._block.__exit__(kind, error, trace)

    def _leave(self, error: BaseException | None) -> None:
        self._line.leave(self._number)
        if self._over:
            return
        why = error.args[0] if isinstance(error, asyncio.CancelledError) and error.args else error
        told = None if why is None else write_error(why if isinstance(why, MaitredError) else Bug())
        left = error is not None and not isinstance(error, Exception) and not isinstance(why, MaitredError)
        self.flush()
        leaves = ReleaseRequest(
            *(self._number, self._tally.usage, self._tally.first_token_s),
            *(self.met, None if left else told, left),
        )
        if not self._cut_off:
            self._line.tell(leaves)
        elif (request_id := self.unanswered) is not None:
            self._line.give_up(request_id)
        elif (resumes := self.resumes()) is not None:
            self._line.owe(replace(resumes, ended=resumes.ended or leaves))

    # --- what the controller says ---

    def hear(self, message: ToWorker) -> None:
        """See `Caller.hear`."""
        if isinstance(message, AdmitRejected):
            self._over = True
            error = read_error(message.error)
            if message.standing is not None:
                self._tally.standing = message.standing
            if isinstance(error, Overloaded):
                self._tally.forecast = error.place
            # It ends here, whatever it does.
            if self._waiter is None:
                self._block.interrupt(error)
            self._error = error
        elif isinstance(message, AdmitAccepted):
            self._seated = message
        elif isinstance(message, Dispatched):
            self._released, self.met = message, AttemptResult.NEITHER
        elif isinstance(message, SettleReply):
            self._settled = message
            self._over = message.error is None  # what is settled holds nothing any more
        self._wake()

    def cut(self) -> None:
        """See `Caller.cut`. An answer that is on its way goes on without the controller."""
        self._cut_off = True
        self._wake()

    def resumes(self) -> ResumeGrant | None:
        """See `Caller.resumes`."""
        if self._asks is None or self._seated is None or self._settled is not None:
            return None
        self._cut_off = False
        self._taken, self._first = _NOTHING, False  # the usage says it
        return ResumeGrant(
            replace(self._asks, prompts=[replace(prompt, ids=[]) for prompt in self._asks.prompts]),
            self._seated.lease,
            self._seated.max_tokens,
            "" if self._released is None else self._released.replica,
            self._tally.usage,
            self._tally.first_token_s,
            self._settles,
        )

    @property
    def unanswered(self) -> str | None:
        """See `Caller.unanswered`."""
        return self._asks.request_id if self._asks is not None and self._seated is None and not self._over else None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _news(self) -> None:
        """Waits until something is said; raises what stands against the request."""
        if self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error

    # --- the grant ---

    @property
    def lease(self) -> str:
        """See `AnyGrant.lease`."""
        return self._known.lease

    @property
    def max_tokens(self) -> int:
        """See `AnyGrant.max_tokens`."""
        return self._known.max_tokens

    def served_by(self, replica: str) -> None:
        """See `AnyGrant.served_by`: the controller knows."""

    def used(self, usage: Usage) -> None:
        """See `AnyGrant.used`: the tally says it."""

    async def settle(self, usage: Usage, outcome: Outcome) -> None:
        """See `AnyGrant.settle`."""
        if self._settled is None:
            self.flush()
            self._settles = SettleRequest(self._number, usage, outcome, self._tally.first_token_s)
            self._line.tell(self._settles)
        while self._settled is None:
            try:
                if self._cut_off:
                    await self._line.ready(kept=True)
                else:
                    await self._news()
            except Unavailable:
                if not self._cut_off:
                    raise
                # Its caller need not wait for the next one, who settles it then.
                _log.warning("Request %s ended while the controller was away.", self._tally.request_id)
                return
        if (error := self._settled.error) is not None:
            self._settles = self._settled = None
            raise read_error(error)

    # --- the seat ---

    async def granted(self) -> AnyEndpoint:
        """See `AnySeat.granted`."""
        while self._released is None:
            if self._cut_off:
                await self._line.ready(kept=True)
            else:
                await self._news()
        CURRENT_DISPATCH.set(self)
        replica = self._released.replica
        if (engine := self._submissions.get(replica)) is not None and not engine.met:
            await engine.meet()
        return self._posts[replica]

    def hedge_after_s(self) -> float | None:
        """See `AnySeat.hedge_after_s`: requests that are hedged are not asked for here."""
        return None

    def spare(self) -> HedgeAllocation | None:
        """See `AnySeat.spare`."""
        return None

    @property
    def elsewhere(self) -> bool:
        """See `AnySeat.elsewhere`; as of its release."""
        return self._released is not None and self._released.elsewhere

    def again(self, *, prompts: Sequence[int], answer_by_s: float | None = None, rest_s: float | None = None) -> bool:
        """See `AnySeat.again`."""
        if self._returns >= self._recoveries or self._over:
            return False
        self._returns += 1
        self.flush()
        self._released = None
        self._line.tell(ReplicaFailed(self._number, self.met, list(prompts), answer_by_s, rest_s))
        return True

    @property
    def expected_tokens(self) -> int:
        """See `AnySeat.expected_tokens`."""
        return self._known.expected_tokens

    @property
    def waited_ms(self) -> dict[str, float]:
        """See `AnySeat.waited_ms`."""
        return {} if self._released is None else self._released.waited_ms

    def place(self) -> QueuePosition | None:
        """See `AnySeat.place`; as of its joining."""
        return None if self._released is not None else self._known.place

    def submitted(self) -> None:
        """See `AnySeat.submitted`: the engine's next report tells."""
        if self._released is not None and (engine := self._submissions.get(self._released.replica)) is not None:
            engine.sent(self._number)

    def took(self, *, prompt_tokens: int = 0, cached_tokens: int = 0, output_tokens: int = 0) -> None:
        """See `AnySeat.took`."""
        if self._taken is _NOTHING:
            self._line.gather(self)
        prompt, cached, output = self._taken
        self._taken = prompt + prompt_tokens, cached + cached_tokens, output + output_tokens

    def first_token(self) -> None:
        """See `AnySeat.first_token`."""
        # At the end of this turn: the tokens themselves are told in the same breath, and so is all of a whole answer.
        self._first = True
        asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Tells of the tokens that were gathered."""
        if self._first or self._taken is not _NOTHING:
            self._line.tell(TokensUsed(self._number, *self._taken, first=self._first))
            self._taken, self._first = _NOTHING, False

    @property
    def _known(self) -> AdmitAccepted:
        if self._seated is None:
            raise RuntimeError("The seat was asked for before it was taken.")
        return self._seated


class RemoteFlowController:
    """Implements `maitred.app.request.flow_control.FlowController`.

    Args:
        line: To the controller.
        posts: Pool -> its replicas, by name.
        submissions: Pool -> what was sent to its engines.
        config: What tokens cost, and how long answers are by default.
        recoveries: How often a request may wait for another replica.
    """

    def __init__(
        self,
        line: ControllerClient,
        posts: Mapping[str, Mapping[str, AnyEndpoint]],
        submissions: Mapping[str, Mapping[str, SubmissionTracker]],
        config: AdmissionConfig,
        recoveries: int,
    ) -> None:
        self._line = line
        self._posts = posts
        self._submissions = submissions
        self._prices = PriceList(config.prices)
        self._default_output_tokens = config.default_output_tokens
        self._recoveries = recoveries

    @property
    def default_output_tokens(self) -> int | None:
        """See `Control.default_output_tokens`."""
        return self._default_output_tokens

    def price_of(self, model: str) -> Price:
        """See `Control.price_of`."""
        return self._prices.of(model).price

    def check(self, pool: str, errand: DispatchRequest) -> None:
        """See `Control.check`: the controller looks when it is asked for a place."""

    async def relieve(self, pool: str, errand: DispatchRequest) -> bool:
        """See `Control.relieve`: no request that could be sent elsewhere is asked for here."""
        return False

    async def admit(
        self, pool: str, errand: DispatchRequest, work: AdmissionRequest, story: RequestTimeline, running: Holder
    ) -> tuple[RemoteDispatch, RemoteDispatch]:
        """See `Control.admit`."""
        await self._line.ready()
        posts = self._posts[pool]
        seat = await running.enter_async_context(
            RemoteDispatch(
                self._line,
                posts,
                self._submissions.get(pool, {}),
                CancelScope(),
                work,
                self._recoveries,
            )
        )
        await seat.take(_asks(seat.number, pool, errand, work, compared=len(posts) > 1))
        return seat, seat

    async def peek(self, principal: Principal, model: str) -> RateLimitStatus | None:
        """See `Control.peek`."""
        try:
            answer = await self._line.ask(lambda number: RateLimitQuery(number, principal, model))
        except Unavailable:
            return None
        assert isinstance(answer, RateLimitReply)
        return answer.standing

    def place_of(self, request_id: str, organisation: str) -> QueuePosition | None:
        """See `Control.place_of`: whoever asks is answered by the controller."""
        return None

    def serving(self, pool: str) -> bool:
        """See `Control.serving`."""
        return self._line.up


def _asks(number: int, pool: str, errand: DispatchRequest, work: AdmissionRequest, *, compared: bool) -> AdmitRequest:
    """The request, as the controller is asked for it.

    Args:
        number: Of the seat.
        pool: Where it waits.
        errand: As the queue sees it.
        work: As admission sees it.
        compared: Whether replicas are compared by what they hold of its prompts. Else these are not told, but how long
            they are.
    """
    return AdmitRequest(
        number=number,
        pool=pool,
        principal=work.principal,
        request_id=errand.id,
        route=work.route,
        model=work.model,
        arrived_s=errand.arrived_s,
        flow=errand.flow,
        prompts=[
            PromptSummary(len(prompt), list(prompt[: len(prompt)]) if compared else []) for prompt in errand.prompts
        ],
        choices=errand.choices,
        length=errand.max_tokens,
        window_left=work.window_left,
        max_tokens=work.max_tokens,
        min_tokens=work.min_tokens,
        deadline_s=errand.deadline_s,
        session=errand.session,
        max_tokens_param=work.max_tokens_param,
        prompt_param=work.prompt_param,
    )


CURRENT_DISPATCH: ContextVar["RemoteDispatch | None"] = ContextVar("seat of the request in hand", default=None)
"""The seat for which a task sends something to a replica."""
_NOTHING = (0, 0, 0)
"""Tokens of the prompt, of these cached, and of the answer."""
_log = logging.getLogger(__name__)


_MET = {
    AttemptOutcome.SUCCESS: AttemptResult.SUCCESS,
    AttemptOutcome.FAILURE: AttemptResult.FAILURE,
    AttemptOutcome.NEITHER: AttemptResult.NEITHER,
}


class RemoteUpstreamStatus(UpstreamStatus):
    """Lets everything through, and notes at the request's seat what it has met."""

    def check(self) -> None:
        """See `UpstreamStatus.check`: whoever was released to it may go."""

    def begin(self) -> BreakerAttempt:
        """See `UpstreamStatus.begin`."""
        return BreakerAttempt(0, probe=False, begun_s=0.0)

    def answered(self, attempt: BreakerAttempt) -> None:
        """See `UpstreamStatus.answered`: the seat hears of the first token."""

    def ended(self, attempt: BreakerAttempt, outcome: AttemptOutcome) -> None:
        """See `UpstreamStatus.ended`."""
        self._note(_MET[outcome])

    def missed(self, reason: str) -> None:
        """See `UpstreamStatus.missed`."""
        self.reason = reason
        self._note(AttemptResult.AWAY)

    def _note(self, met: AttemptResult) -> None:
        seat = CURRENT_DISPATCH.get()
        if seat is not None and seat.met is not AttemptResult.AWAY:
            seat.met = met


_PATIENCE_S = 2.0
"""For a line to an engine that the controller says is there."""
