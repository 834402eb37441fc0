"""Copies of requests that a canary answers for nobody to see, so that its answers can be compared.

A copy begins with the request that it copies, and has a task, a context and an account of its own: nothing of it is on
the way of the caller's answer. It is in the lowest class, and there is none where it would have to wait. Its owner ends
all that are under way when the gateway ends.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum

from msgspec.structs import replace

from maitred.app.assembly.access import OPERATORS
from maitred.app.request.fallback import Respond
from maitred.core.clock import Clock
from maitred.core.context import RequestContext
from maitred.core.errors import CallerError, MaitredError, Refused
from maitred.core.flow import LOWEST_PRIORITY, FlowLevel
from maitred.core.ids import new_object_id
from maitred.core.inference import InferenceRequest, TextDelta
from maitred.core.resource_stack import ResourceStack
from maitred.core.rollout import RolloutArm, RolloutVersion
from maitred.core.tenancy import Principal, Scope
from maitred.routing.pools.route_table import RouteTarget
from maitred.routing.rollout.agreement import agree, append_tool_calls
from maitred.routing.rollout.live import LiveRollout
from maitred.routing.rollout.trial import TrialObservation

log = logging.getLogger(__name__)

Told = Callable[[LiveRollout, TrialObservation], None]

_LONGEST_S = 300.0
"""A copy that has not ended by then has failed."""
_MOST_WAIT_S = 1.0
"""If it would have to wait longer, there is none."""


class _ShadowPrincipal(Principal, frozen=True, kw_only=True):
    """Whose copies are: of the operators, and of none of those whose requests are limited together."""

    @property
    def subjects(self) -> tuple[str, ...]:
        """Without the whole installation: copies must not take what callers would have got."""
        return super().subjects[:-1]


SHADOW = _ShadowPrincipal(
    key="shadow",
    tenants=(OPERATORS,),
    scopes=frozenset({Scope.INFERENCE}),
    priority_ceiling=LOWEST_PRIORITY,
    shares=(FlowLevel(OPERATORS), FlowLevel("shadow")),
)
"""The account of all copies."""


class ShadowOutcome(StrEnum):
    """Outcome of a shadow request."""

    AGREED = "agreed"
    DISAGREED = "disagreed"
    ANSWERED = "answered"
    """The two answers could not be compared."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """There was no room."""
    DROPPED = "dropped"
    """What it copies ended early, or this gateway did."""


class ShadowRequest:
    """Shadow copy of one request, and the answer that its original got."""

    def __init__(self) -> None:
        self._parts: list[TextDelta] = []
        self._original: asyncio.Future[Sequence[str] | None] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None

    def on_delta(self, parts: Sequence[TextDelta]) -> None:
        """Collects what the caller of the original got."""
        self._parts += parts

    def whole(self) -> None:
        """The caller has got everything."""
        self._end(texts_of(self._parts))

    def on_failure(self) -> None:
        """The caller got an error: there is nothing to compare."""
        self._end(None)

    def drop(self) -> None:
        """The caller has left: nobody needs it."""
        self._end(None)
        if self.task is not None:
            self.task.cancel()

    async def original(self) -> Sequence[str] | None:
        """The texts that the caller got, once it has them; None: it did not."""
        return await self._original

    def _end(self, texts: Sequence[str] | None) -> None:
        self._parts = []
        if not self._original.done():
            self._original.set_result(texts)


class ShadowTraffic:
    """Makes copies. A context that owns them; without it there are none.

    Args:
        clock: The time.
        told: Told how one ended, if that says something of the canary.

    Attributes:
        ends: Rollout and end -> copies.
    """

    def __init__(self, clock: Clock, on_result: Told) -> None:
        self._clock = clock
        self._told = on_result
        self._running: Counter[str] = Counter()
        self._group: asyncio.TaskGroup | None = None
        self.ends: Counter[tuple[str, str]] = Counter()

    async def run(self) -> None:
        """Owns the copies until it is cancelled, and then ends them."""
        async with asyncio.TaskGroup() as self._group:
            try:
                await asyncio.Event().wait()
            finally:
                self._group = None

    @property
    def running(self) -> int:
        """Copies that have not ended."""
        return self._running.total()

    def begin(
        self,
        rollout: LiveRollout,
        request: InferenceRequest,
        context: RequestContext,
        target: RouteTarget,
        respond: Respond,
    ) -> ShadowRequest | None:
        """A copy of a request that begins now; None: there is no room for one.

        Args:
            rollout: Which one.
            request: The request.
            context: What is known of it.
            target: Where the canary is.
            respond: Starts the response there.
        """
        name = rollout.state.name
        if self._group is None:
            return None
        if self._running[name] >= rollout.config.shadow_limit:
            self.ends[name, ShadowOutcome.SKIPPED] += 1
            return None
        copy = ShadowRequest()
        self._running[name] += 1
        copy.task = self._group.create_task(
            self._run(copy, rollout, _quiet(request), context.route, target, respond), name="shadow copy"
        )
        copy.task.add_done_callback(lambda _: self._on_end(name))
        return copy

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
        """Takes a copy to its end, whatever that is: no fault of it goes further."""
        name, trial = rollout.state.name, rollout.trial
        context = RequestContext(new_object_id("copy"), self._clock.monotonic_s(), route, SHADOW)
        context.arm = RolloutArm(name, RolloutVersion.CANARY)
        end = ShadowOutcome.DROPPED
        try:
            end, seen = await self._run_copy(copy, rollout, request, context, target, respond)
            if seen is not None and rollout.trial is trial:
                self._told(rollout, seen)
        except Exception:
            log.exception("A copy of a request to %s broke.", name)
        finally:
            self.ends[name, end] += 1

    async def _run_copy(
        self,
        copy: ShadowRequest,
        rollout: LiveRollout,
        request: InferenceRequest,
        context: RequestContext,
        target: RouteTarget,
        respond: Respond,
    ) -> tuple[ShadowOutcome, TrialObservation | None]:
        """How it ended, and what that says of the canary."""
        parts: list[TextDelta] = []
        failed = TrialObservation(failed=True, copied=True)
        try:
            async with asyncio.timeout(_LONGEST_S), ResourceStack() as stack:
                answer = await respond(target, request, SHADOW, context, stack)
                position = context.predicted_position
                if position is not None and (position.position > 0 or position.wait_s > _MOST_WAIT_S):
                    return ShadowOutcome.SKIPPED, None
                async for some in answer:
                    parts += some
        except (Refused, CallerError):
            return ShadowOutcome.SKIPPED, None
        except (TimeoutError, MaitredError):
            # What was never sent says nothing of the canary: it waited, or came while a failure was got over.
            return (ShadowOutcome.SKIPPED, None) if context.dispatched_s is None else (ShadowOutcome.FAILED, failed)
        seen = TrialObservation(tokens=context.completion_tokens, copied=True)
        trial, greedy = rollout.config.trial, request.sampling.temperature == 0
        similarity = trial.similarity if greedy else trial.sampled_similarity
        original = await copy.original()
        if original is None or similarity is None:
            return ShadowOutcome.ANSWERED, seen
        agreed = agree(original, texts_of(parts), similarity, greedy=greedy)
        return ShadowOutcome.AGREED if agreed else ShadowOutcome.DISAGREED, replace(seen, agreed=agreed)


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


def _quiet(request: InferenceRequest) -> InferenceRequest:
    """Returns the request with the lowest priority and without a caller to bill."""
    return replace(
        request,
        priority=LOWEST_PRIORITY,
        ttft_in_s=None,
        itl_objective_s=None,
        deadline_in_s=None,
        partial=False,
        degradable=False,
        max_usd=None,
        whole=True,
        retries=0,
    )
