"""What a request has of dispatch: a place in the line, then a replica, then nothing."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from maitred.core.queue_position import QueuePosition
from maitred.dispatch.entry import QueuedRequest, QueueState
from maitred.dispatch.passage import WaitSpan
from maitred.dispatch.request import AnyEndpoint
from maitred.dispatch.spare import HedgeAllocation

if TYPE_CHECKING:
    from maitred.dispatch.dispatcher import Dispatcher


class OverflowRequested(Exception):
    """Raised to an entry that another model would serve sooner; it answers `DispatchEntry.move` or `DispatchEntry.stay`.

    Args:
        seat: It keeps its place here until then, and can be granted meanwhile.
    """

    def __init__(self, seat: "DispatchEntry") -> None:
        super().__init__()
        self.seat = seat


class DispatchEntry:
    """One request's. Made by `Dispatcher.seat`; entering joins the line, leaving gives everything back.

    Nothing here awaits but `granted`, so leaving is complete when it returns, also when a `CancelledError` leaves.
    """

    __slots__ = ("_dispatcher", "_waiter", "answer", "moved", "passage", "runs_at", "ticket")

    passage: WaitSpan
    """What is told of its waiting; since it has joined the line."""

    def __init__(self, dispatcher: "Dispatcher", ticket: QueuedRequest, runs_at: str = "") -> None:
        self._dispatcher = dispatcher
        self.runs_at = runs_at
        """The replica that it ran at before it had a seat here; empty: at none."""
        self._waiter: asyncio.Future[None] | None = None
        self.answer: asyncio.Future[None] | None = None
        """Done when it has gone elsewhere, or will not; None: it was not asked."""
        self.moved = False
        """Whether it has gone elsewhere."""
        self.ticket = ticket

    async def __aenter__(self) -> "DispatchEntry":
        self._dispatcher.join(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dispatcher.leave(self, error)

    async def granted(self) -> AnyEndpoint:
        """Waits for its turn; the replica is chosen then, and its credits are taken. One task at a time.

        Cancelled while it waits, it can be asked again.

        Raises:
            DeadlineExceeded: The deadline passed, or nothing can be ready by then any more.
            ReplicaUnavailable: None has been ready for longer than its class waits.
            AskedToLeave: It should go elsewhere (of an errand that is `movable`, once at most). It can be asked again.
        """
        ticket = self.ticket
        while ticket.state is QueueState.WAITING:
            if self.answer is not None and not self.answer.done():
                raise OverflowRequested(self)
            if self._waiter is not None:
                raise RuntimeError("Another task waits for this seat already.")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if ticket.failure is not None:
            raise ticket.failure
        if ticket.state is not QueueState.RELEASED or ticket.grip is None:
            raise RuntimeError("The seat was asked for outside its context.")
        return ticket.grip.station.post

    def wake(self) -> None:
        """Its state has changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def ask_to_leave(self) -> None:
        """Asks it to go elsewhere; see `answer`."""
        self.answer = asyncio.get_running_loop().create_future()
        self.wake()

    def stay(self) -> None:
        """It was asked to leave, and does not; also when it does not wait any more."""
        self._dispatcher.stays(self.ticket)
        self.answered()

    def answered(self) -> None:
        """Whoever has asked need not wait for an answer any more."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(None)

    def move(self) -> bool:
        """It was asked to leave, and leaves its context next, if it still waits; returns whether it does."""
        self.moved = self.ticket.state is QueueState.WAITING
        if not self.moved:
            self.stay()
        return self.moved

    def hedge_after_s(self) -> float | None:
        """How long to wait for the granted replica before a `spare` one is asked as well; None: whatever it takes.

        To be asked once, when the request is sent.
        """
        return self._dispatcher.hedge_after_s(self.ticket)

    def spare(self) -> HedgeAllocation | None:
        """A second replica, from now until its `settle`; None: the budget has none, or none has room."""
        return self._dispatcher.spare(self.ticket)

    @property
    def elsewhere(self) -> bool:
        """Whether another replica is ready that has not failed it."""
        return self._dispatcher.elsewhere(self)

    def again(self, *, prompts: Sequence[int], answer_by_s: float | None = None, rest_s: float | None = None) -> bool:
        """Gives up the granted replica, which has failed it, and waits for another one; `granted` says which.

        It keeps its age, goes before those who have not run, and nothing is charged twice.

        Args:
            prompts: Those that have not been answered in full, by their numbers. `submitted` is to be called for each.
            answer_by_s: When its whole answer must be there; waiting ends then.
            rest_s: For how long that replica gets no requests; None: for longer each time.

        Returns:
            False if that has happened too often; nothing has changed then.
        """
        return self._dispatcher.again(self, prompts=prompts, answer_by_s=answer_by_s, rest_s=rest_s)

    @property
    def expected_tokens(self) -> int:
        """Output that is predicted for each choice."""
        return self.ticket.expected_tokens

    @property
    def waited_ms(self) -> dict[str, float]:
        """Milliseconds that it waited, by cause (see `WaitCause`); complete once it is granted."""
        return self.ticket.waited_ms

    def place(self) -> QueuePosition | None:
        """Where it stands; None once it is granted."""
        return self._dispatcher.place(self.ticket)

    def submitted(self) -> None:
        """To be called after each submission to the granted replica, in the order of the errand's prompts.

        From then on the replica's own reports can count it. Without it, it counts twice until its first token.
        """
        self._dispatcher.floor.submitted(self.ticket)

    def took(self, *, prompt_tokens: int = 0, cached_tokens: int = 0, output_tokens: int = 0) -> None:
        """Real tokens as they come.

        The whole prompt was charged when the seat was granted; what was found in the cache is given back here, and what
        was never computed on leaving.

        Args:
            prompt_tokens: Of prompts whose first tokens came now, cached ones included.
            cached_tokens: Of these, found in the prefix cache.
            output_tokens: New ones.
        """
        self._dispatcher.floor.took(self.ticket, prompt_tokens, cached_tokens, output_tokens)

    def first_token(self) -> None:
        """The first token came: the prediction is compared with it."""
        self._dispatcher.first_token(self.ticket)
