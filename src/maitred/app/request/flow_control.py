"""What decides for requests: when their turn comes, what they may use, which replica they get.

The pipeline asks it once for each request, and then only tells it what comes. So those who decide need not be where the
text is: with one process they are (`LocalFlowController`), and asking them is a call.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from maitred.admission.admission import Admission
from maitred.admission.grant import Grant
from maitred.admission.request import AdmissionRequest
from maitred.app.request.resources import Holder
from maitred.core.answer import Outcome, RateLimitStatus
from maitred.core.clock import Clock
from maitred.core.flow import QueuePosition
from maitred.core.money import Price
from maitred.core.request import Usage
from maitred.core.tenancy import Principal
from maitred.core.timeline import RequestTimeline, SpanName
from maitred.dispatch.dispatcher import DispatchEntry, Dispatcher, HedgeAllocation
from maitred.dispatch.request import AnyEndpoint, DispatchRequest


class GrantHandle(Protocol):
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


class DispatchHandle(Protocol):
    """A place in the line, then at a replica; see `maitred.dispatch.dispatcher.DispatchEntry`."""

    async def granted(self) -> AnyEndpoint:
        """See `DispatchEntry.granted`."""
        ...

    def hedge_after_s(self) -> float | None:
        """See `DispatchEntry.hedge_after_s`."""
        ...

    def spare(self) -> HedgeAllocation | None:
        """See `DispatchEntry.spare`."""
        ...

    @property
    def elsewhere(self) -> bool:
        """See `DispatchEntry.elsewhere`."""
        ...

    def again(self, *, prompts: Sequence[int], answer_by_s: float | None = None, rest_s: float | None = None) -> bool:
        """See `DispatchEntry.again`."""
        ...

    @property
    def expected_tokens(self) -> int:
        """See `DispatchEntry.expected_tokens`."""
        ...

    @property
    def waited_ms(self) -> dict[str, float]:
        """See `DispatchEntry.waited_ms`."""
        ...

    def place(self) -> QueuePosition | None:
        """See `DispatchEntry.place`."""
        ...

    def submitted(self) -> None:
        """See `DispatchEntry.submitted`."""
        ...

    def took(self, *, prompt_tokens: int = 0, cached_tokens: int = 0, output_tokens: int = 0) -> None:
        """See `DispatchEntry.took`."""
        ...

    def first_token(self) -> None:
        """See `DispatchEntry.first_token`."""
        ...


class FlowController(Protocol):
    """What the pipeline asks of those who decide. A `pool` is a model of the catalog."""

    @property
    def default_output_tokens(self) -> int | None:
        """For a choice of a request that names no `max_tokens`; None: as many as fit."""
        ...

    def price_of(self, model: str) -> Price:
        """What the tokens of a model cost."""
        ...

    def check(self, pool: str, errand: DispatchRequest) -> QueuePosition | None:
        """See `Dispatcher.check`. None: that is looked at when it is admitted."""
        ...

    async def relieve(self, pool: str, errand: DispatchRequest) -> bool:
        """See `Dispatcher.relieve`."""
        ...

    async def admit(
        self, pool: str, errand: DispatchRequest, work: AdmissionRequest, story: RequestTimeline, running: Holder
    ) -> tuple[GrantHandle, DispatchHandle]:
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

    async def peek(self, principal: Principal, model: str) -> RateLimitStatus | None:
        """See `Admission.peek`."""
        ...

    def place_of(self, request_id: str, organisation: str) -> QueuePosition | None:
        """See `Dispatcher.place_of`, for any model."""
        ...

    def serving(self, pool: str) -> bool:
        """See `Dispatcher.serving`."""
        ...


class LocalFlowController:
    """Implements `FlowController` where they are: in this process.

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
        """See `FlowController.default_output_tokens`."""
        return self._admission.default_output_tokens

    def price_of(self, model: str) -> Price:
        """See `FlowController.price_of`."""
        return self._admission.price_of(model)

    def check(self, pool: str, errand: DispatchRequest) -> QueuePosition:
        """See `FlowController.check`."""
        return self._dispatchers[pool].check(errand)

    async def relieve(self, pool: str, errand: DispatchRequest) -> bool:
        """See `FlowController.relieve`."""
        return await self._dispatchers[pool].relieve(errand)

    async def admit(
        self, pool: str, errand: DispatchRequest, work: AdmissionRequest, story: RequestTimeline, running: Holder
    ) -> tuple[Grant, DispatchEntry]:
        """See `FlowController.admit`."""
        now_s = self._clock.monotonic_s
        began_s = now_s()
        # Entered here, and held from then on: who enters on behalf of others is a coroutine more for each.
        admitted = self._admission.admit(work)
        try:
            grant = await admitted.__aenter__()
        except BaseException as failure:
            story.fail(SpanName.ADMISSION, began_s, now_s(), {}, failure)
            raise
        running.push_async_exit(admitted)
        facts = {"max_tokens": grant.max_tokens, "clamped": grant.clamped, "lease": grant.lease}
        story.tell(SpanName.ADMISSION, began_s, now_s(), facts)
        if grant.max_tokens != errand.max_tokens:
            errand = replace(errand, max_tokens=grant.max_tokens)
        place = self._dispatchers[pool].seat(errand)
        seat = await place.__aenter__()
        running.push_async_exit(place)
        return grant, seat

    async def resume(
        self, pool: str, errand: DispatchRequest, work: AdmissionRequest, lease: str, replica: str, running: Holder
    ) -> tuple[Grant, DispatchEntry | None]:
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

    async def peek(self, principal: Principal, model: str) -> RateLimitStatus | None:
        """See `FlowController.peek`."""
        return await self._admission.peek(principal, model)

    def place_of(self, request_id: str, organisation: str) -> QueuePosition | None:
        """See `FlowController.place_of`."""
        for dispatcher in self._dispatchers.values():
            if (place := dispatcher.place_of(request_id, organisation)) is not None:
                return place
        return None

    def serving(self, pool: str) -> bool:
        """See `FlowController.serving`."""
        return self._dispatchers[pool].serving
