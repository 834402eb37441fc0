"""What a worker's request has of the controller: its grant and its place, both in one."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType

from maitred.admission.work import Work
from maitred.api.interrupt import Interruptible
from maitred.app.workers.hotline import AWAY, Hotline
from maitred.app.workers.submissions import Submissions
from maitred.core.answer import Outcome
from maitred.core.errors import Bug, MaitredError, Overloaded, Unavailable
from maitred.core.place import Place
from maitred.core.request import Usage
from maitred.dispatch.errand import AnyPost
from maitred.dispatch.spare import Spare
from maitred.wire.desk import (
    Asks,
    FailedThere,
    Leaves,
    Met,
    Refused,
    Released,
    Seated,
    Settled,
    Settles,
    Took,
    ToWorker,
)
from maitred.wire.written_errors import read_error, write_error

HERE: ContextVar["FarSeat | None"] = ContextVar("seat of the request in hand", default=None)
"""The seat for which a task sends something to a replica."""
_log = logging.getLogger(__name__)
_GATHERED_S = 0.025
"""How long tokens are gathered before the controller is told of them, whose fair queue charges them."""


class FarSeat:
    """Implements `maitred.app.control.AnyGrant` and `AnySeat`. A context; leaving it gives everything back.

    Args:
        line: To the controller.
        posts: The replicas of the model, by name...
        submissions: ...and what was sent to those of them that are engines of ours.
        block: What ends when the controller ends the request.
        work: The request, with its tally.
        recoveries: How often it may wait for another replica.

    Attributes:
        met: What its attempt says of the server that it is at.
    """

    def __init__(
        self,
        line: Hotline,
        posts: Mapping[str, AnyPost],
        submissions: Mapping[str, Submissions],
        block: Interruptible,
        work: Work,
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
        self._said: asyncio.Queue[ToWorker | MaitredError] = asyncio.Queue()
        self._listening = False
        """Whether somebody waits for what is said next."""
        self._seated: Seated | None = None
        self._released: Released | None = None
        self._returns = 0
        self._over = False
        self._cut_off = False
        """Whether the controller that had granted it is gone."""
        self._taken = (0, 0, 0)
        self._gathering: asyncio.TimerHandle | None = None
        self.met = Met.NEITHER

    async def take(self, asks: Asks) -> None:
        """Asks for it; raises what stands against it."""
        self._line.tell(asks)
        seated = await self._heard()
        assert isinstance(seated, Seated)
        tally, self._seated = self._tally, seated
        tally.standing, tally.forecast = seated.standing, seated.place
        tally.clamped_max_tokens = seated.max_tokens if seated.clamped else None

    @property
    def number(self) -> int:
        """Under which the controller knows it."""
        return self._number

    async def __aenter__(self) -> "FarSeat":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.leave(self._number)
        if self._gathering is not None:
            self._gathering.cancel()
        if self._over:
            return
        why = error.args[0] if isinstance(error, asyncio.CancelledError) and error.args else error
        told = None if why is None else write_error(why if isinstance(why, MaitredError) else Bug())
        left = error is not None and not isinstance(error, Exception) and not isinstance(why, MaitredError)
        self._flush()
        self._line.tell(
            Leaves(self._number, self._tally.usage, self._tally.first_token_s, self.met, None if left else told, left)
        )

    # --- what the controller says ---

    def hear(self, message: ToWorker) -> None:
        """See `Caller.hear`."""
        if isinstance(message, Refused):
            self._over = True
            error = read_error(message.error)
            if message.standing is not None:
                self._tally.standing = message.standing
            if isinstance(error, Overloaded):
                self._tally.forecast = error.place
            self._end(error)
        else:
            self._said.put_nowait(message)

    def cut(self) -> None:
        """See `Caller.cut`. An answer that is on its way goes on without the controller."""
        self._over = self._cut_off = True
        if self._listening:
            self._end(Unavailable(AWAY, retry_after_s=1.0))

    def _end(self, error: MaitredError) -> None:
        """It ends here, whatever it does."""
        if self._listening:
            self._said.put_nowait(error)
        else:
            self._block.interrupt(error)

    async def _heard(self) -> ToWorker:
        """What is said next; raises what stands against the request."""
        self._listening = True
        try:
            message = await self._said.get()
        finally:
            self._listening = False
        if isinstance(message, MaitredError):
            raise message
        return message

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
        self._flush()
        self._line.tell(Settles(self._number, usage, outcome, self._tally.first_token_s))
        try:
            settled = None if self._cut_off else await self._heard()
        except MaitredError:
            if not self._cut_off:
                raise
            settled = None
        if settled is None:
            # The ledger has it as interrupted, and nobody pays for it. Its caller need not be told.
            _log.warning("Request %s ended while the controller was away; it is not billed.", self._tally.request_id)
            return
        assert isinstance(settled, Settled)
        if settled.error is not None:
            raise read_error(settled.error)

    # --- the seat ---

    async def granted(self) -> AnyPost:
        """See `AnySeat.granted`."""
        if self._released is None:
            released = await self._heard()
            assert isinstance(released, Released)
            self._released, self.met = released, Met.NEITHER
        HERE.set(self)
        return self._posts[self._released.replica]

    def hedge_after_s(self) -> float | None:
        """See `AnySeat.hedge_after_s`: requests that are hedged are not asked for here."""
        return None

    def spare(self) -> Spare | None:
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
        self._flush()
        self._released = None
        self._line.tell(FailedThere(self._number, self.met, list(prompts), answer_by_s, rest_s))
        return True

    @property
    def expected_tokens(self) -> int:
        """See `AnySeat.expected_tokens`."""
        return self._known.expected_tokens

    @property
    def waited_ms(self) -> dict[str, float]:
        """See `AnySeat.waited_ms`."""
        return {} if self._released is None else self._released.waited_ms

    def place(self) -> Place | None:
        """See `AnySeat.place`; as of its joining."""
        return None if self._released is not None else self._known.place

    def submitted(self) -> None:
        """See `AnySeat.submitted`: the engine's next report tells."""
        if self._released is not None and (engine := self._submissions.get(self._released.replica)) is not None:
            engine.sent(self._number)

    def took(self, *, prompt_tokens: int = 0, cached_tokens: int = 0, output_tokens: int = 0) -> None:
        """See `AnySeat.took`."""
        prompt, cached, output = self._taken
        self._taken = prompt + prompt_tokens, cached + cached_tokens, output + output_tokens
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(_GATHERED_S, self._flush)

    def first_token(self) -> None:
        """See `AnySeat.first_token`."""
        self._line.tell(Took(self._number, 0, 0, 0, first=True))

    def _flush(self) -> None:
        """Tells of the tokens that were gathered."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
            self._line.tell(Took(self._number, *self._taken))
            self._taken = (0, 0, 0)

    @property
    def _known(self) -> Seated:
        if self._seated is None:
            raise RuntimeError("The seat was asked for before it was taken.")
        return self._seated
