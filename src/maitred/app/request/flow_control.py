"""Flow controller: admits a request and enqueues it, in this process or in the controller process.

Flow control is meant as in inference gateways (which requests run when), not as flow control of bytes.

The pipeline asks the flow controller once for each request, and then reports tokens and the end. So the flow controller
can run in another process: `LocalFlowController` runs in this process, `RemoteFlowController` asks the controller
process.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, overload

from msgspec.structs import replace

from maitred.admission.admission import Admission
from maitred.admission.grant import Grant
from maitred.admission.request import AdmissionRequest
from maitred.core.clock import Clock
from maitred.core.context import Outcome, RateLimitStatus
from maitred.core.flow import QueuePosition
from maitred.core.request import Usage
from maitred.core.resource_stack import ResourceStack
from maitred.core.tenancy import Principal
from maitred.core.timeline import RequestTimeline, SpanName
from maitred.core.usage import Price
from maitred.dispatch.dispatcher import DispatchEntry, Dispatcher, HedgeAllocation
from maitred.dispatch.request import AnyEndpoint, DispatchRequest


class GrantHandle(Protocol):
    """Grant of one request: what it may use. See `maitred.admission.grant.Grant`."""

    @property
    def lease(self) -> str:
        """Id of the request's reservation in the ledger."""
        ...

    @property
    def max_tokens(self) -> int:
        """Output tokens that each choice may have."""
        ...

    def set_replica(self, replica: str) -> None:
        """Notes which replica serves the request; as `Grant.set_replica`."""
        ...

    def record_usage(self, usage: Usage) -> None:
        """Notes the tokens used so far; as `Grant.record_usage`."""
        ...

    async def settle(self, usage: Usage, outcome: Outcome) -> None:
        """Settles the reservation with the final usage; as `Grant.settle`."""
        ...


class DispatchHandle(Protocol):
    """Handle of one request in dispatch, while it waits and while it runs at a replica.

    See `maitred.dispatch.dispatcher.DispatchEntry`.
    """

    async def wait_dispatched(self) -> AnyEndpoint:
        """Waits until a replica is assigned; as `DispatchEntry.wait_dispatched`."""
        ...

    def start_hedge_timer(self) -> float | None:
        """Returns how late the replica may be before a second one is asked; as `DispatchEntry.start_hedge_timer`."""
        ...

    def hedge(self) -> HedgeAllocation | None:
        """Takes a second replica; as `DispatchEntry.hedge`."""
        ...

    @property
    def has_other_replica(self) -> bool:
        """Whether another replica is ready that has not failed the request; as `DispatchEntry.has_other_replica`."""
        ...

    @property
    def has_idle_replica(self) -> bool:
        """Whether one of these has room and nobody waits; as `DispatchEntry.has_idle_replica`."""
        ...

    def requeue(
        self, *, prompts: Sequence[int], answer_by_s: float | None = None, suspend_s: float | None = None
    ) -> bool:
        """Gives up the failed replica and waits for another; as `DispatchEntry.requeue`."""
        ...

    @property
    def region(self) -> str | None:
        """Region of the assigned replica; None: it has no name, or no replica is assigned."""
        ...

    @property
    def expected_tokens(self) -> int:
        """Output tokens that are predicted for each choice."""
        ...

    @property
    def waited_ms(self) -> dict[str, float]:
        """Milliseconds that the request waited, by cause."""
        ...

    def position(self) -> QueuePosition | None:
        """Returns the position in the queue; None once it is dispatched."""
        ...

    def on_submitted(self) -> None:
        """Notes one submission to the replica; as `DispatchEntry.on_submitted`."""
        ...

    def charge_tokens(self, *, prompt_tokens: int = 0, cached_tokens: int = 0, output_tokens: int = 0) -> None:
        """Charges real tokens as they come; as `DispatchEntry.charge_tokens`."""
        ...

    def on_first_token(self) -> None:
        """Compares the first token's time with the prediction; as `DispatchEntry.on_first_token`."""
        ...


class FlowController(Protocol):
    """Admission and dispatch as the pipeline uses them. A `pool` is a model of the catalog."""

    @property
    def default_output_tokens(self) -> int | None:
        """Output tokens of a choice if the request has no `max_tokens`; None: as many as fit."""
        ...

    def price_of(self, model: str) -> Price:
        """Returns the price of a model's tokens."""
        ...

    def check(self, pool: str, dispatch_request: DispatchRequest) -> QueuePosition | None:
        """Rejects the request if it may not wait, else predicts its queue position; None: `admit` does this."""
        ...

    async def overflow_others(self, pool: str, dispatch_request: DispatchRequest) -> bool:
        """Asks other requests to overflow; as `Dispatcher.overflow_others`."""
        ...

    @overload
    async def admit(
        self,
        pool: str,
        dispatch_request: DispatchRequest,
        admission_request: AdmissionRequest,
        timeline: RequestTimeline,
        stack: ResourceStack,
    ) -> tuple[GrantHandle, DispatchHandle]: ...
    @overload
    async def admit(
        self,
        pool: str,
        dispatch_request: None,
        admission_request: AdmissionRequest,
        timeline: RequestTimeline,
        stack: ResourceStack,
    ) -> tuple[GrantHandle, None]: ...
    async def admit(
        self,
        pool: str,
        dispatch_request: DispatchRequest | None,
        admission_request: AdmissionRequest,
        timeline: RequestTimeline,
        stack: ResourceStack,
    ) -> tuple[GrantHandle, DispatchHandle | None]:
        """Reserves limits for the request, then enqueues it.

        Args:
            pool: The pool to enqueue in.
            dispatch_request: The request for the queue, with `max_tokens` as it was before limits clamp it; None: a
                cache has its answer, so that it waits in no queue and needs no replica.
            admission_request: As admission sees it.
            timeline: Gets the admission span.
            stack: Owns grant and queue entry: closing it releases the entry, then settles the grant.

        Raises:
            MaitredError: The request is rejected; nothing stays reserved.
        """
        ...

    async def rate_limit_status(self, principal: Principal, model: str) -> RateLimitStatus | None:
        """Returns what is left of a caller's rate limits."""
        ...

    async def check_limits(self, principal: Principal, least_output: int) -> None:
        """Checks whether the caller's limits have room for the smallest request; as `Admission.check_limits`."""
        ...

    def position_of(self, request_id: str, organisation: str) -> QueuePosition | None:
        """Returns the queue position of a waiting request, in the queue of any model; None: it does not wait."""
        ...

    def serving(self, pool: str) -> bool:
        """Whether the pool has a replica that serves or is starting."""
        ...


class LocalFlowController:
    """Implements `FlowController` with the dispatchers and the admission of this process.

    Args:
        dispatchers: Dispatcher of each pool.
        admission: Admits requests to limits and clamps `max_tokens`.
        clock: Clock for the times in timelines.
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
        """Output tokens that are assumed where a request names no limit."""
        return self._admission.default_output_tokens

    def price_of(self, model: str) -> Price:
        """Returns the price of a model's tokens."""
        return self._admission.price_of(model)

    def is_refusing(self, pool: str) -> bool:
        """Returns whether all servers of a pool refuse requests; see `TextReplica.is_refusing`."""
        return all(
            not state.endpoint.reports_capacity and state.endpoint.replica.is_refusing()
            for state in self._dispatchers[pool].core.endpoint_states
        )

    def check(self, pool: str, dispatch_request: DispatchRequest) -> QueuePosition:
        """Rejects a request if it may not wait, else predicts its queue position."""
        return self._dispatchers[pool].load_shedder.check(dispatch_request, self._clock.monotonic_s())

    async def overflow_others(self, pool: str, dispatch_request: DispatchRequest) -> bool:
        """Asks other requests to overflow."""
        return await self._dispatchers[pool].overflow_others(dispatch_request)

    @overload
    async def admit(
        self,
        pool: str,
        dispatch_request: DispatchRequest,
        admission_request: AdmissionRequest,
        timeline: RequestTimeline,
        stack: ResourceStack,
    ) -> tuple[Grant, DispatchEntry]: ...
    @overload
    async def admit(
        self,
        pool: str,
        dispatch_request: None,
        admission_request: AdmissionRequest,
        timeline: RequestTimeline,
        stack: ResourceStack,
    ) -> tuple[Grant, None]: ...
    async def admit(
        self,
        pool: str,
        dispatch_request: DispatchRequest | None,
        admission_request: AdmissionRequest,
        timeline: RequestTimeline,
        stack: ResourceStack,
    ) -> tuple[Grant, DispatchEntry | None]:
        """Reserves limits and enqueues the request; implements `FlowController.admit`."""
        now_s = self._clock.monotonic_s
        began_s = now_s()
        try:
            grant = stack.push_async_exit(await self._admission.admit(admission_request))
        except BaseException as failure:
            timeline.fail(SpanName.ADMISSION, began_s, now_s(), {}, failure)
            raise
        facts = {"max_tokens": grant.max_tokens, "clamped": grant.clamped, "lease": grant.lease}
        timeline.record(SpanName.ADMISSION, began_s, now_s(), facts)
        if dispatch_request is None:
            return grant, None
        if grant.max_tokens != dispatch_request.max_tokens:
            dispatch_request = replace(dispatch_request, max_tokens=grant.max_tokens)
        entry = await stack.enter_async_context(self._dispatchers[pool].enqueue(dispatch_request))
        return grant, entry

    async def reattach(
        self,
        pool: str,
        dispatch_request: DispatchRequest | None,
        admission_request: AdmissionRequest,
        lease: str,
        replica: str,
        stack: ResourceStack,
    ) -> tuple[Grant, DispatchEntry | None]:
        """Takes over a request that an earlier controller process admitted and that still waits or runs.

        Args:
            pool: Where it runs or waits.
            dispatch_request: The request for the queue, with the granted `max_tokens`; None: a cache has its answer.
            admission_request: As admission sees it.
            lease: The lease, recovered from the ledger.
            replica: The replica that runs it; empty: it waits.
            stack: Holds both.

        The entry is None if the replica no longer exists, or the answer comes from a cache.
        """
        max_tokens = admission_request.cached_tokens if dispatch_request is None else dispatch_request.max_tokens
        grant = stack.push_async_exit(await self._admission.resume(admission_request, lease, max_tokens))
        if dispatch_request is None:
            return grant, None
        dispatcher = self._dispatchers[pool]
        entry = dispatcher.reattach(dispatch_request, replica) if replica else dispatcher.enqueue(dispatch_request)
        return grant, None if entry is None else await stack.enter_async_context(entry)

    async def rate_limit_status(self, principal: Principal, model: str) -> RateLimitStatus | None:
        """Returns what is left of a caller's rate limits."""
        return await self._admission.rate_limit_status(principal, model)

    async def check_limits(self, principal: Principal, least_output: int) -> None:
        """Checks whether a caller's limits have room for the smallest request."""
        await self._admission.check_limits(principal, least_output)

    def position_of(self, request_id: str, organisation: str) -> QueuePosition | None:
        """Returns where a waiting request stands, at any model."""
        for dispatcher in self._dispatchers.values():
            if (position := dispatcher.position_of(request_id, organisation)) is not None:
                return position
        return None

    def serving(self, pool: str) -> bool:
        """Whether a model has a replica that serves, or will have one."""
        return self._dispatchers[pool].serving
