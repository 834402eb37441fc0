"""Observes requests of canary rollouts: records one observation per request, and starts shadow copies.

If the canary fails and the stable version answers as fallback, the failure counts against the canary. The answer of the
stable version is not recorded, because the failed attempt delayed it.
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

_UNRELATED_ERRORS = (LimitReached, Unauthenticated, Forbidden, ModelNotFound, StoreUnavailable, Draining)
"""Errors that do not depend on the version: limits, keys, or faults of the gateway."""
_MAX_TOKENS_STEP_PREFIX = "max_tokens="
"""Prefix of a degradation that does not change the model."""


class RolloutObserver:
    """Records observations of requests for the trials of rollouts.

    Args:
        live: The rollouts in progress.
        rollouts: Applies the decision of a trial.
        clock: The clock.

    Attributes:
        shadow_traffic: Sends shadow copies, while its `run` runs.
    """

    def __init__(self, live: LiveRollouts, rollouts: RolloutAdmin, clock: Clock) -> None:
        self._live = live
        self._rollouts = rollouts
        self._clock = clock
        self.shadow_traffic = ShadowTraffic(clock, self._on_comparison)

    def observe(
        self,
        answers: FallbackStream,
        route_plan: RoutePlan,
        request: InferenceRequest,
        context: RequestContext,
        respond: Respond,
    ) -> AbstractAsyncContextManager[ResponseStream]:
        """Wraps a response so that its observation is recorded in a running trial.

        Args:
            answers: The response, before `__aenter__`.
            route_plan: Route plan of the request.
            request: The request.
            context: Request context.
            respond: Starts the response of the shadow copy.
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

        pending = PendingObservation(arm.version, context.started_s, so_far)
        rollout.add_pending(pending)
        shadow_request: ShadowRequest | None = None
        try:
            async with answers as stream:
                # Copy only admitted requests, before their result is known, so that the copies are an unbiased sample.
                if (
                    route_plan.shadow_target is not None
                    and context.is_computed
                    and context.arm == arm
                    and rollout.split.is_shadowed(context.request_id)
                ):
                    shadow_request = self.shadow_traffic.begin(
                        rollout, request, context, route_plan.shadow_target, respond
                    )
                yield stream if shadow_request is None else _tapped_deltas(stream, shadow_request.on_delta)
        except (asyncio.CancelledError, GeneratorExit) as left:
            is_gateway_error = bool(left.args) and isinstance(left.args[0], MaitredError)
            pending.end(None if is_gateway_error else so_far(self._clock.monotonic_s()))
            if shadow_request is not None:
                shadow_request.drop()
            raise
        except Exception as error:
            pending.end(_observation_of(answers.first_failure or error))
            if shadow_request is not None:
                shadow_request.on_failure()
            raise
        else:
            observation = so_far(self._clock.monotonic_s())
            is_complete = not (observation.failed or observation.refused)
            if not context.is_computed:
                pending.end(None)  # an answer from the cache says nothing of the version
            else:
                pending.end(_with_tokens(observation, context.completion_tokens) if is_complete else observation)
            if shadow_request is not None:
                shadow_request.on_complete() if is_complete else shadow_request.on_failure()
        finally:
            self._rollouts.apply_decision(rollout, rollout.advance(self._clock.monotonic_s()))

    def _on_comparison(self, rollout: LiveRollout, seen: TrialObservation) -> None:
        self._rollouts.apply_decision(rollout, rollout.record_comparison(seen))


async def _tapped_deltas(
    answer: ResponseStream, on_deltas: Callable[[list[TextDelta]], None]
) -> AsyncIterator[list[TextDelta]]:
    """Iterates over a response and passes its deltas to a callback as well."""
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
    if any(not step.startswith(_MAX_TOKENS_STEP_PREFIX) for step in context.degraded):
        return TrialObservation(refused=True)  # degraded to another model
    # After a replica failure, the time since arrival counts.
    start_s = context.started_s if context.recoveries else context.dispatched_s
    first_s = now_s if context.first_token_s is None else context.first_token_s
    intervals = context.completion_tokens - 1
    itl_s = sum(context.gaps_s) / intervals if context.gaps_s and intervals > 0 else None
    return TrialObservation(ttft_s=None if start_s is None else first_s - start_s, itl_s=itl_s)


def _observation_of(failure: BaseException | None) -> TrialObservation | None:
    """Makes the observation of a failure; None: the failure does not depend on the version."""
    if isinstance(failure, _UNRELATED_ERRORS):
        return None
    if isinstance(failure, CallerError | Refused):
        # Bad requests reach both versions equally; a version that rejects more of them shows a higher rate.
        return TrialObservation(refused=True)
    return TrialObservation(failed=True)


def _with_tokens(seen: TrialObservation, tokens: int) -> TrialObservation:
    return TrialObservation(ttft_s=seen.ttft_s, itl_s=seen.itl_s, tokens=tokens)
