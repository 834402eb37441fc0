"""Shadow traffic: copies of requests to a canary, whose answers are compared with the originals and discarded.

A copy starts with its original and has its own task, context and principal, so it does not delay the original. It has
the lowest priority, and is skipped if it would have to wait. Running copies are cancelled when the gateway stops.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum

from msgspec.structs import replace

from maitred.app.assembly.access import OPERATORS
from maitred.app.request.fallback import Respond
from maitred.core.clock import Clock
from maitred.core.context import RequestContext
from maitred.core.errors import CallerError, MaitredError, Refused
from maitred.core.flow import LOWEST_PRIORITY, FlowLevel
from maitred.core.ids import new_object_id
from maitred.core.inference import CacheControl, InferenceRequest, TextDelta
from maitred.core.resource_stack import ResourceStack
from maitred.core.rollout import RolloutArm, RolloutVersion
from maitred.core.tenancy import Principal, Scope
from maitred.routing.pools.route_table import RouteTarget
from maitred.routing.rollout.agreement import agree, append_tool_calls
from maitred.routing.rollout.live import LiveRollout
from maitred.routing.rollout.trial import TrialObservation

log = logging.getLogger(__name__)

ComputeCopy = Callable[[RequestContext], Awaitable[list[TextDelta] | None]]
"""Computes the answer to a copy of a request; see `compute_copy`."""
OnResult = Callable[[LiveRollout, TrialObservation], None]

_TIMEOUT_S = 300.0
"""Timeout of a copy."""
_MAX_QUEUE_WAIT_S = 1.0
"""A copy with a longer predicted wait is skipped."""


class _ShadowPrincipal(Principal, frozen=True, kw_only=True):
    """Principal of shadow copies: the operators, without the installation-wide limits."""

    @property
    def subjects(self) -> tuple[str, ...]:
        """The limit subjects without the installation, so that copies do not use up limits of clients."""
        return super().subjects[:-1]


SHADOW = _ShadowPrincipal(
    key="shadow",
    tenants=(OPERATORS,),
    scopes=frozenset({Scope.INFERENCE}),
    priority_ceiling=LOWEST_PRIORITY,
    shares=(FlowLevel(OPERATORS), FlowLevel("shadow")),
)
"""Principal of all copies."""


class ShadowOutcome(StrEnum):
    """Outcome of a shadow request."""

    AGREED = "agreed"
    DISAGREED = "disagreed"
    ANSWERED = "answered"
    """The two answers could not be compared."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """The copy was rejected or would have waited."""
    DROPPED = "dropped"
    """The client of the original disconnected, or the gateway stopped."""


class ShadowRequest:
    """Shadow copy of one request, and the answer that its original got."""

    def __init__(self) -> None:
        self._parts: list[TextDelta] = []
        self._original: asyncio.Future[Sequence[str] | None] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None

    def on_delta(self, parts: Sequence[TextDelta]) -> None:
        """Collects what the caller of the original got."""
        self._parts += parts

    def on_complete(self) -> None:
        """Handles the complete answer of the original."""
        self._set_original(texts_of(self._parts))

    def on_failure(self) -> None:
        """Handles a failure of the original: there is nothing to compare with."""
        self._set_original(None)

    def drop(self) -> None:
        """Cancels the copy: the client of the original has disconnected."""
        self._set_original(None)
        if self.task is not None:
            self.task.cancel()

    async def original_texts(self) -> Sequence[str] | None:
        """Waits for the texts of the original; None: it has failed."""
        return await self._original

    def _set_original(self, texts: Sequence[str] | None) -> None:
        self._parts = []
        if not self._original.done():
            self._original.set_result(texts)


class ShadowTraffic:
    """Starts shadow copies and owns their tasks while `run` runs; without `run` there are no copies.

    Args:
        clock: The clock.
        on_result: Called with the observation of a copy that says something about the canary.

    Attributes:
        outcome_counts: (rollout, outcome) -> number of copies.
    """

    def __init__(self, clock: Clock, on_result: OnResult) -> None:
        self._clock = clock
        self._on_result = on_result
        self._running: Counter[str] = Counter()
        self._group: asyncio.TaskGroup | None = None
        self.outcome_counts: Counter[tuple[str, str]] = Counter()

    async def run(self) -> None:
        """Runs until cancelled, and then cancels all copies."""
        async with asyncio.TaskGroup() as self._group:
            try:
                await asyncio.Event().wait()
            finally:
                self._group = None

    @property
    def running(self) -> int:
        """The number of running copies."""
        return self._running.total()

    def begin(
        self,
        rollout: LiveRollout,
        request: InferenceRequest,
        context: RequestContext,
        target: RouteTarget,
        respond: Respond,
    ) -> ShadowRequest | None:
        """Starts a copy of a request; None: too many run already.

        Args:
            rollout: The rollout.
            request: The request.
            context: Context of the original.
            target: Target of the canary.
            respond: Starts the response of the copy.
        """
        name = rollout.state.name
        if self._group is None:
            return None
        if self._running[name] >= rollout.config.shadow_limit:
            self.outcome_counts[name, ShadowOutcome.SKIPPED] += 1
            return None
        shadow_request = ShadowRequest()
        self._running[name] += 1
        shadow_request.task = self._group.create_task(
            self._run(shadow_request, rollout, to_shadow_request(request), context.route, target, respond),
            name="shadow copy",
        )
        shadow_request.task.add_done_callback(lambda _: self._on_end(name))
        return shadow_request

    def _on_end(self, name: str) -> None:
        self._running[name] -= 1

    async def _run(
        self,
        copy: ShadowRequest,
        rollout: LiveRollout,
        request: InferenceRequest,
        route: str,
        target: RouteTarget,
        respond: Respond,
    ) -> None:
        """Runs a copy and records its outcome; raises no error."""
        name, trial = rollout.state.name, rollout.trial
        context = RequestContext(new_object_id("copy"), self._clock.monotonic_s(), route, SHADOW)
        context.arm = RolloutArm(name, RolloutVersion.CANARY)
        outcome = ShadowOutcome.DROPPED
        try:
            outcome, observation = await self._run_copy(copy, rollout, request, context, target, respond)
            if observation is not None and rollout.trial is trial:
                self._on_result(rollout, observation)
        except Exception:
            log.exception("A copy of a request to %s broke.", name)
        finally:
            self.outcome_counts[name, outcome] += 1

    async def _run_copy(
        self,
        copy: ShadowRequest,
        rollout: LiveRollout,
        request: InferenceRequest,
        context: RequestContext,
        target: RouteTarget,
        respond: Respond,
    ) -> tuple[ShadowOutcome, TrialObservation | None]:
        """Sends the copy and compares its answer; returns the outcome and the observation."""
        failed = TrialObservation(failed=True, copied=True)
        try:
            parts = await compute_copy(respond, target, request, context)
        except (Refused, CallerError):
            return ShadowOutcome.SKIPPED, None
        except (TimeoutError, MaitredError):
            # A copy that was never dispatched says nothing about the canary.
            return (ShadowOutcome.SKIPPED, None) if context.dispatched_s is None else (ShadowOutcome.FAILED, failed)
        if parts is None:
            return ShadowOutcome.SKIPPED, None
        seen = TrialObservation(tokens=context.completion_tokens, copied=True)
        trial, greedy = rollout.config.trial, request.sampling.temperature == 0
        similarity = trial.similarity if greedy else trial.sampled_similarity
        original = await copy.original_texts()
        if original is None or similarity is None:
            return ShadowOutcome.ANSWERED, seen
        agreed = agree(original, texts_of(parts), similarity, greedy=greedy)
        return ShadowOutcome.AGREED if agreed else ShadowOutcome.DISAGREED, replace(seen, agreed=agreed)


async def compute_copy(
    respond: Respond, target: RouteTarget, request: InferenceRequest, context: RequestContext
) -> list[TextDelta] | None:
    """Computes the answer to a copy of a request in spare room; the operators pay for it.

    Args:
        respond: Starts its response.
        target: The model.
        request: The copy, as of `to_shadow_request`.
        context: Context of the copy.

    Returns:
        The deltas of the answer; None: the copy would have had to wait, so nothing was computed.

    Raises:
        MaitredError: It was rejected, or failed.
        TimeoutError: It took too long.
    """
    parts: list[TextDelta] = []
    async with asyncio.timeout(_TIMEOUT_S), ResourceStack() as stack:
        answer = await respond(target, request, SHADOW, context, stack)
        position = context.predicted_position
        if position is not None and (position.position > 0 or position.wait_s > _MAX_QUEUE_WAIT_S):
            return None
        async for deltas in answer:
            parts += deltas
    return parts


def texts_of(parts: Sequence[TextDelta]) -> list[str]:
    """Returns the text and the tool calls of each choice of an answer."""
    count = 1 + max((part.index for part in parts), default=-1)
    return [
        append_tool_calls(
            "".join(part.text for part in parts if part.index == index),
            [part.extra for part in parts if part.index == index and part.extra],
        )
        for index in range(count)
    ]


def to_shadow_request(request: InferenceRequest) -> InferenceRequest:
    """Returns the request of the copy: lowest priority, no deadlines, no degradation, no cache, not streamed."""
    return replace(
        request,
        priority=LOWEST_PRIORITY,
        ttft_in_s=None,
        itl_objective_s=None,
        deadline_in_s=None,
        partial=False,
        degradable=False,
        cache=CacheControl(no_cache=True, no_store=True),
        max_usd=None,
        whole=True,
        retries=0,
    )
