"""What a worker's request has of the controller: its grant and its place, both in one.

It outlives the controller. The next one is told what was granted, gives it the place that it had, and settles it.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType

from msgspec.structs import replace

from maitred.admission.work import AdmissionRequest
from maitred.api.cancel_scope import CancelScope
from maitred.app.workers.client import ControllerClient
from maitred.app.workers.submissions import SubmissionTracker
from maitred.core.answer import Outcome
from maitred.core.errors import Bug, MaitredError, Overloaded, Unavailable
from maitred.core.queue_position import QueuePosition
from maitred.core.request import Usage
from maitred.dispatch.request import AnyEndpoint
from maitred.dispatch.spare import HedgeAllocation
from maitred.wire.error_codec import read_error, write_error
from maitred.wire.worker_protocol import (
    AdmitAccepted,
    AdmitRejected,
    AdmitRequest,
    AttemptResult,
    Dispatched,
    ReleaseRequest,
    ReplicaFailed,
    ResumeGrant,
    SettleReply,
    SettleRequest,
    TokensUsed,
    ToWorker,
)

CURRENT_DISPATCH: ContextVar["RemoteDispatch | None"] = ContextVar("seat of the request in hand", default=None)
"""The seat for which a task sends something to a replica."""
_NOTHING = (0, 0, 0)
"""Tokens of the prompt, of these cached, and of the answer."""
_log = logging.getLogger(__name__)


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
