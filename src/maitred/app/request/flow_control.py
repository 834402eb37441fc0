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
from maitred.app.request.resources import ContextStack
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

    def set_replica(self, replica: str) -> None:
        """See `Grant.set_replica`."""
        ...

    def record_usage(self, usage: Usage) -> None:
        """See `Grant.record_usage`."""
        ...

    async def settle(self, usage: Usage, outcome: Outcome) -> None:
        """See `Grant.settle`."""
        ...


class DispatchHandle(Protocol):
    """A place in the line, then at a replica; see `maitred.dispatch.dispatcher.DispatchEntry`."""

    async def wait_dispatched(self) -> AnyEndpoint:
        """See `DispatchEntry.wait_dispatched`."""
        ...

    def hedge_after_s(self) -> float | None:
        """See `DispatchEntry.hedge_after_s`."""
        ...

    def hedge(self) -> HedgeAllocation | None:
        """See `DispatchEntry.hedge`."""
        ...

    @property
    def has_other_replica(self) -> bool:
        """See `DispatchEntry.has_other_replica`."""
        ...

    def requeue(self, *, prompts: Sequence[int], answer_by_s: float | None = None, rest_s: float | None = None) -> bool:
        """See `DispatchEntry.requeue`."""
        ...

    @property
    def expected_tokens(self) -> int:
        """See `DispatchEntry.expected_tokens`."""
        ...

    @property
    def waited_ms(self) -> dict[str, float]:
        """See `DispatchEntry.waited_ms`."""
        ...

    def position(self) -> QueuePosition | None:
        """See `DispatchEntry.position`."""
        ...

    def on_submitted(self) -> None:
        """See `DispatchEntry.on_submitted`."""
        ...

    def charge_tokens(self, *, prompt_tokens: int = 0, cached_tokens: int = 0, output_tokens: int = 0) -> None:
        """See `DispatchEntry.charge_tokens`."""
        ...

    def on_first_token(self) -> None:
        """See `DispatchEntry.on_first_token`."""
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

    def predict(self, pool: str, dispatch_request: DispatchRequest) -> QueuePosition | None:
        """See `Dispatcher.predict`. None: that is looked at when it is admitted."""
        ...

    async def make_room(self, pool: str, dispatch_request: DispatchRequest) -> bool:
        """See `Dispatcher.make_room`."""
        ...

    async def admit(
        self,
        pool: str,
        dispatch_request: DispatchRequest,
        admission_request: AdmissionRequest,
        timeline: RequestTimeline,
        running: ContextStack,
    ) -> tuple[GrantHandle, DispatchHandle]:
        """Takes what a request needs from its caller's limits, and then a place in the line.

        Args:
            pool: Where it waits.
            dispatch_request: As the queue sees it, with the length of its answer before any limit has had a look at it.
            admission_request: As admission sees it.
            timeline: Where it is told how that went.
            running: Holds both: leaving it gives up the place, and then settles what has not been settled.

        Raises:
            MaitredError: What stands against it; nothing is held then.
        """
        ...

    async def rate_limit_status(self, principal: Principal, model: str) -> RateLimitStatus | None:
        """See `Admission.rate_limit_status`."""
        ...

    def position_of(self, request_id: str, organisation: str) -> QueuePosition | None:
        """See `Dispatcher.position_of`, for any model."""
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

    def predict(self, pool: str, dispatch_request: DispatchRequest) -> QueuePosition:
        """See `FlowController.predict`."""
        return self._dispatchers[pool].predict(dispatch_request)

    async def make_room(self, pool: str, dispatch_request: DispatchRequest) -> bool:
        """See `FlowController.make_room`."""
        return await self._dispatchers[pool].make_room(dispatch_request)

    async def admit(
        self,
        pool: str,
        dispatch_request: DispatchRequest,
        admission_request: AdmissionRequest,
        timeline: RequestTimeline,
        running: ContextStack,
    ) -> tuple[Grant, DispatchEntry]:
        """See `FlowController.admit`."""
        now_s = self._clock.monotonic_s
        began_s = now_s()
        # Entered here, and held from then on: who enters on behalf of others is a coroutine more for each.
        admitted = self._admission.admit(admission_request)
        try:
            grant = await admitted.__aenter__()
        except BaseException as failure:
            timeline.fail(SpanName.ADMISSION, began_s, now_s(), {}, failure)
            raise
        running.push_async_exit(admitted)
        facts = {"max_tokens": grant.max_tokens, "clamped": grant.clamped, "lease": grant.lease}
        timeline.record(SpanName.ADMISSION, began_s, now_s(), facts)
        if grant.max_tokens != dispatch_request.max_tokens:
            dispatch_request = replace(dispatch_request, max_tokens=grant.max_tokens)
        place = self._dispatchers[pool].enqueue(dispatch_request)
        entry = await place.__aenter__()
        running.push_async_exit(place)
        return grant, entry

    async def resume(
        self,
        pool: str,
        dispatch_request: DispatchRequest,
        admission_request: AdmissionRequest,
        lease: str,
        replica: str,
        running: ContextStack,
    ) -> tuple[Grant, DispatchEntry | None]:
        """As `admit`, for what a process that has died since had admitted, and which goes on.

        Args:
            pool: Where it runs or waits.
            dispatch_request: As the queue sees it; its length is what was granted.
            admission_request: As admission sees it.
            lease: Which the ledger has carried over.
            replica: Where it runs; empty: it waits.
            running: Holds both.

        Returns:
            What it holds. It has no seat where nobody knows its replica any more.
        """
        grant = await running.enter_async_context(
            self._admission.resume(admission_request, lease, dispatch_request.max_tokens)
        )
        dispatcher = self._dispatchers[pool]
        entry = dispatcher.resume(dispatch_request, replica) if replica else dispatcher.enqueue(dispatch_request)
        return grant, None if entry is None else await running.enter_async_context(entry)

    async def rate_limit_status(self, principal: Principal, model: str) -> RateLimitStatus | None:
        """See `FlowController.rate_limit_status`."""
        return await self._admission.rate_limit_status(principal, model)

    def position_of(self, request_id: str, organisation: str) -> QueuePosition | None:
        """See `FlowController.position_of`."""
        for dispatcher in self._dispatchers.values():
            if (position := dispatcher.position_of(request_id, organisation)) is not None:
                return position
        return None

    def serving(self, pool: str) -> bool:
        """See `FlowController.serving`."""
        return self._dispatchers[pool].serving
