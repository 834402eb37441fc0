"""Observations for canary trials: one for each request, of the side of the rollout that it was on.

A request that the canary could not answer and the stable version did is the canary's failure; what the stable version
made of it says nothing, for it came late through no fault of its own.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from maitred.app.admin.rollouts import RolloutAdmin
from maitred.app.request.fallback import FallbackStream, Respond
from maitred.app.request.shadow_traffic import ShadowRequest, ShadowTraffic
from maitred.core.clock import Clock
from maitred.core.context import RequestContext
from maitred.core.errors import (
    CallerError,
    Draining,
    Forbidden,
    LimitReached,
    MaitredError,
    ModelNotFound,
    Refused,
    StoreUnavailable,
    Unauthenticated,
)
from maitred.core.inference import InferenceRequest, TextDelta
from maitred.core.rollout import RolloutArm
from maitred.core.service import ResponseStream
from maitred.routing.pools.route_table import RoutePlan
from maitred.routing.rollout.live import LiveRollout, LiveRollouts
from maitred.routing.rollout.observations import PendingObservation
from maitred.routing.rollout.trial import TrialObservation

_ABOUT_OTHERS = (LimitReached, Unauthenticated, Forbidden, ModelNotFound, StoreUnavailable, Draining)
"""Failures that say nothing of the version: the caller's own limits and keys, or ours."""
_SAME_MODEL = "max_tokens="
"""How a step of a degradation ladder begins that stays at the model."""


class RolloutObserver:
    """Watches requests for the trials of their rollouts.

    Args:
        live: The rollouts.
        rollouts: Does what a trial says.
        clock: The time.

    Attributes:
        shadows: The copies. Its `run` must be running, or there are none.
    """

    def __init__(self, live: LiveRollouts, rollouts: RolloutAdmin, clock: Clock) -> None:
        self._live = live
        self._rollouts = rollouts
        self._clock = clock
        self.shadows = ShadowTraffic(clock, self._on_comparison)

    def observe(
        self,
        answers: FallbackStream,
        route_plan: RoutePlan,
        request: InferenceRequest,
        context: RequestContext,
        respond: Respond,
    ) -> AbstractAsyncContextManager[ResponseStream]:
        """Wraps a response so that a running trial learns how it went.

        Args:
            answers: The answer, not entered.
            route_plan: Where it may go.
            request: The request.
            context: What is known of it.
            respond: Starts the response of a model, for a copy.
        """
        arm = route_plan.arm
        rollout = None if arm is None else self._live.get(arm.rollout)
        if arm is None or rollout is None or not arm.tried or not rollout.is_on_trial:
            return answers
        return self._on_trial(rollout, arm, answers, route_plan, request, context, respond)

    @asynccontextmanager
    async def _on_trial(
        self,
        rollout: LiveRollout,
        arm: RolloutArm,
        answers: FallbackStream,
        route_plan: RoutePlan,
        request: InferenceRequest,
        context: RequestContext,
        respond: Respond,
    ) -> AsyncIterator[ResponseStream]:
        def so_far(now_s: float) -> TrialObservation:
            return observation_from(arm, answers, context, now_s)

        entry = PendingObservation(arm.version, context.started_s, so_far)
        rollout.add_pending(entry)
        copy: ShadowRequest | None = None
        try:
            async with answers as answer:
                # Only what was taken is copied, whatever becomes of it: so that says nothing of how the copy will fare.
                if (
                    route_plan.shadow_target is not None
                    and context.arm == arm
                    and rollout.split.is_shadowed(context.request_id)
                ):
                    copy = self.shadows.begin(rollout, request, context, route_plan.shadow_target, respond)
                yield answer if copy is None else _tap(answer, copy.on_delta)
        except (asyncio.CancelledError, GeneratorExit) as left:
            ours = bool(left.args) and isinstance(left.args[0], MaitredError)
            entry.end(None if ours else so_far(self._clock.monotonic_s()))
            if copy is not None:
                copy.drop()
            raise
        except Exception as error:
            entry.end(_observation_of(answers.first_failure or error))
            if copy is not None:
                copy.on_failure()
            raise
        else:
            seen = so_far(self._clock.monotonic_s())
            whole = not (seen.failed or seen.refused)
            entry.end(_with_tokens(seen, context.completion_tokens) if whole else seen)
            if copy is not None:
                copy.whole() if whole else copy.on_failure()
        finally:
            self._rollouts.apply_decision(rollout, rollout.advance(self._clock.monotonic_s()))

    def _on_comparison(self, rollout: LiveRollout, seen: TrialObservation) -> None:
        self._rollouts.apply_decision(rollout, rollout.record_comparison(seen))


async def _tap(answer: ResponseStream, on_deltas: Callable[[list[TextDelta]], None]) -> AsyncIterator[list[TextDelta]]:
    """Response whose deltas a listener sees as well."""
    async for parts in answer:
        on_deltas(parts)
        yield parts


def observation_from(
    arm: RolloutArm, answers: FallbackStream, context: RequestContext, now_s: float
) -> TrialObservation:
    """Makes an observation of a request at a time; one without its first token has waited at least so long.

    The wait in the queue here is left out. How much room there is at a version depends on who came to which when, and
    of servers of others it is learnt; a version that is slow is so from the moment that it has the request.
    """
    if context.arm != arm:
        return _observation_of(answers.first_failure) or TrialObservation(failed=True)
    if any(not step.startswith(_SAME_MODEL) for step in context.degraded):
        return TrialObservation(refused=True)  # another model answers, for want of room at this one
    # A replica that lost the request has cost its caller the time until then.
    begun_s = context.started_s if context.recoveries else context.dispatched_s
    first_s = now_s if context.first_token_s is None else context.first_token_s
    between = context.completion_tokens - 1
    itl_s = sum(context.gaps_s) / between if context.gaps_s and between > 0 else None
    return TrialObservation(ttft_s=None if begun_s is None else first_s - begun_s, itl_s=itl_s)


def _observation_of(failure: BaseException | None) -> TrialObservation | None:
    """Returns what a failure says of the version; None: nothing."""
    if isinstance(failure, _ABOUT_OTHERS):
        return None
    if isinstance(failure, CallerError | Refused):
        # Bad requests meet both sides alike; of a version that takes fewer of them there are more.
        return TrialObservation(refused=True)
    return TrialObservation(failed=True)


def _with_tokens(seen: TrialObservation, tokens: int) -> TrialObservation:
    return TrialObservation(ttft_s=seen.ttft_s, itl_s=seen.itl_s, tokens=tokens)
