"""What decides for requests: when their turn comes, what they may use, which replica they get.

The pipeline asks it once for each request, and then only tells it what comes. So those who decide need not be where the
text is: with one process they are (`LocalControl`), and asking them is a call.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from maitred.admission.admission import Admission
from maitred.admission.grant import Grant
from maitred.admission.work import Work
from maitred.app.holding import Holder
from maitred.core.answer import Outcome, Standing
from maitred.core.clock import Clock
from maitred.core.money import Price
from maitred.core.place import Place
from maitred.core.request import Usage
from maitred.core.story import ChapterName, Story
from maitred.core.tenancy import Principal
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.errand import AnyPost, Errand
from maitred.dispatch.seat import Seat
from maitred.dispatch.spare import Spare


class AnyGrant(Protocol):
    """What a request may use; see `maitred.admission.grant.Grant`."""

    @property
    def lease(self) -> str:
        """Of its line in the ledger."""
        ...

    @property
    def max_tokens(self) -> int:
        """For each choice."""
        ...

    def served_by(self, replica: str) -> None:
        """See `Grant.served_by`."""
        ...

    def used(self, usage: Usage) -> None:
        """See `Grant.used`."""
        ...

    async def settle(self, usage: Usage, outcome: Outcome) -> None:
        """See `Grant.settle`."""
        ...


class AnySeat(Protocol):
    """A place in the line, then at a replica; see `maitred.dispatch.seat.Seat`."""

    async def granted(self) -> AnyPost:
        """See `Seat.granted`."""
        ...

    def hedge_after_s(self) -> float | None:
        """See `Seat.hedge_after_s`."""
        ...

    def spare(self) -> Spare | None:
        """See `Seat.spare`."""
        ...

    @property
    def elsewhere(self) -> bool:
        """See `Seat.elsewhere`."""
        ...

    def again(self, *, prompts: Sequence[int], answer_by_s: float | None = None, rest_s: float | None = None) -> bool:
        """See `Seat.again`."""
        ...

    @property
    def expected_tokens(self) -> int:
        """See `Seat.expected_tokens`."""
        ...

    @property
    def waited_ms(self) -> dict[str, float]:
        """See `Seat.waited_ms`."""
        ...

    def place(self) -> Place | None:
        """See `Seat.place`."""
        ...

    def submitted(self) -> None:
        """See `Seat.submitted`."""
        ...

    def took(self, *, prompt_tokens: int = 0, cached_tokens: int = 0, output_tokens: int = 0) -> None:
        """See `Seat.took`."""
        ...

    def first_token(self) -> None:
        """See `Seat.first_token`."""
        ...


class Control(Protocol):
    """What the pipeline asks of those who decide. A `pool` is a model of the catalog."""

    @property
    def default_output_tokens(self) -> int | None:
        """For a choice of a request that names no `max_tokens`; None: as many as fit."""
        ...

    def price_of(self, model: str) -> Price:
        """What the tokens of a model cost."""
        ...

    def check(self, pool: str, errand: Errand) -> Place | None:
        """See `Dispatcher.check`. None: that is looked at when it is admitted."""
        ...

    async def relieve(self, pool: str, errand: Errand) -> bool:
        """See `Dispatcher.relieve`."""
        ...

    async def admit(
        self, pool: str, errand: Errand, work: Work, story: Story, running: Holder
    ) -> tuple[AnyGrant, AnySeat]:
        """Takes what a request needs from its caller's limits, and then a place in the line.

        Args:
            pool: Where it waits.
            errand: As the queue sees it, with the length of its answer before any limit has had a look at it.
            work: As admission sees it.
            story: Where it is told how that went.
            running: Holds both: leaving it gives up the place, and then settles what has not been settled.

        Raises:
            MaitredError: What stands against it; nothing is held then.
        """
        ...

    async def peek(self, principal: Principal, model: str) -> Standing | None:
        """See `Admission.peek`."""
        ...

    def place_of(self, request_id: str, organisation: str) -> Place | None:
        """See `Dispatcher.place_of`, for any model."""
        ...

    def serving(self, pool: str) -> bool:
        """See `Dispatcher.serving`."""
        ...


class LocalControl:
    """Implements `Control` where they are: in this process.

    Args:
        dispatchers: For each model of the catalog, the queue before its replicas.
        admission: Who may run, and how long answers may be.
        clock: For the times in stories.
    """

    def __init__(self, dispatchers: Mapping[str, Dispatcher], admission: Admission, clock: Clock) -> None:
        self._dispatchers = dispatchers
        self._admission = admission
        self._clock = clock

    @property
    def pools(self) -> Collection[str]:
        """The models that have a queue."""
        return self._dispatchers.keys()

    @property
    def default_output_tokens(self) -> int | None:
        """See `Control.default_output_tokens`."""
        return self._admission.default_output_tokens

    def price_of(self, model: str) -> Price:
        """See `Control.price_of`."""
        return self._admission.price_of(model)

    def check(self, pool: str, errand: Errand) -> Place:
        """See `Control.check`."""
        return self._dispatchers[pool].check(errand)

    async def relieve(self, pool: str, errand: Errand) -> bool:
        """See `Control.relieve`."""
        return await self._dispatchers[pool].relieve(errand)

    async def admit(self, pool: str, errand: Errand, work: Work, story: Story, running: Holder) -> tuple[Grant, Seat]:
        """See `Control.admit`."""
        now_s = self._clock.monotonic_s
        began_s = now_s()
        # Entered here, and held from then on: who enters on behalf of others is a coroutine more for each.
        admitted = self._admission.admit(work)
        try:
            grant = await admitted.__aenter__()
        except BaseException as failure:
            story.fail(ChapterName.ADMISSION, began_s, now_s(), {}, failure)
            raise
        running.push_async_exit(admitted)
        facts = {"max_tokens": grant.max_tokens, "clamped": grant.clamped, "lease": grant.lease}
        story.tell(ChapterName.ADMISSION, began_s, now_s(), facts)
        if grant.max_tokens != errand.max_tokens:
            errand = replace(errand, max_tokens=grant.max_tokens)
        place = self._dispatchers[pool].seat(errand)
        seat = await place.__aenter__()
        running.push_async_exit(place)
        return grant, seat

    async def resume(
        self, pool: str, errand: Errand, work: Work, lease: str, replica: str, running: Holder
    ) -> tuple[Grant, Seat | None]:
        """As `admit`, for what a process that has died since had admitted, and which goes on.

        Args:
            pool: Where it runs or waits.
            errand: As the queue sees it; its length is what was granted.
            work: As admission sees it.
            lease: Which the ledger has carried over.
            replica: Where it runs; empty: it waits.
            running: Holds both.

        Returns:
            What it holds. It has no seat where nobody knows its replica any more.
        """
        grant = await running.enter_async_context(self._admission.resume(work, lease, errand.max_tokens))
        dispatcher = self._dispatchers[pool]
        seat = dispatcher.resume(errand, replica) if replica else dispatcher.seat(errand)
        return grant, None if seat is None else await running.enter_async_context(seat)

    async def peek(self, principal: Principal, model: str) -> Standing | None:
        """See `Control.peek`."""
        return await self._admission.peek(principal, model)

    def place_of(self, request_id: str, organisation: str) -> Place | None:
        """See `Control.place_of`."""
        for dispatcher in self._dispatchers.values():
            if (place := dispatcher.place_of(request_id, organisation)) is not None:
                return place
        return None

    def serving(self, pool: str) -> bool:
        """See `Control.serving`."""
        return self._dispatchers[pool].serving
