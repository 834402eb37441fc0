"""What a trial sees of a request: one observation of the side that it was on, whatever became of it afterwards.

A request that the canary could not answer and the stable version did is the canary's failure; what the stable version
made of it says nothing, for it came late through no fault of its own.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from maitred.app.rollouts import Rollouts
from maitred.app.succession import Succession
from maitred.core.answer import Answer, Tally
from maitred.core.clock import Clock
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
from maitred.core.rollout import Arm
from maitred.routing.pools.routes import Way
from maitred.routing.rollout.lane import Entry
from maitred.routing.rollout.live import LiveRollout, LiveRollouts
from maitred.routing.rollout.trial import Observation

_ABOUT_OTHERS = (LimitReached, Unauthenticated, Forbidden, ModelNotFound, StoreUnavailable, Draining)
"""Failures that say nothing of the version: the caller's own limits and keys, or ours."""
_SAME_MODEL = "max_tokens="
"""How a step of a degradation ladder begins that stays at the model."""


class Trials:
    """Watches requests for the trials of their rollouts.

    Args:
        live: The rollouts.
        rollouts: Does what a trial says.
        clock: The time.
    """

    def __init__(self, live: LiveRollouts, rollouts: Rollouts, clock: Clock) -> None:
        self._live = live
        self._rollouts = rollouts
        self._clock = clock

    @asynccontextmanager
    async def watched(self, answers: Succession, way: Way, tally: Tally) -> AsyncIterator[Answer]:
        """The same answer; its trial is told how it went.

        Args:
            answers: The answer, not entered.
            way: Where it may go.
            tally: What is known of the request.
        """
        arm = way.arm
        rollout = None if arm is None else self._live.get(arm.rollout)
        if arm is None or rollout is None or not arm.tried or not rollout.on_trial:
            async with answers as answer:
                yield answer
            return

        def so_far(now_s: float) -> Observation:
            return seen_of(arm, answers, tally, now_s)

        entry = Entry(arm.version, tally.started_s, so_far)
        rollout.enter(entry)
        try:
            async with answers as answer:
                yield answer
        except asyncio.CancelledError as cancelled:
            ours = bool(cancelled.args) and isinstance(cancelled.args[0], MaitredError)
            entry.end(None if ours else so_far(self._clock.monotonic_s()))
            raise
        except GeneratorExit:
            entry.end(so_far(self._clock.monotonic_s()))
            raise
        except Exception as error:
            entry.end(_judged(answers.first_failure or error))
            raise
        else:
            seen = so_far(self._clock.monotonic_s())
            whole = not (seen.failed or seen.refused)
            entry.end(_with_tokens(seen, tally.completion_tokens) if whole else seen)
        finally:
            self._look(rollout)

    def _look(self, rollout: LiveRollout) -> None:
        self._rollouts.follow(rollout, rollout.advance(self._clock.monotonic_s()))


def seen_of(arm: Arm, answers: Succession, tally: Tally, now_s: float) -> Observation:
    """What is seen of a request at a time: who waits for its first token has waited so long at least."""
    if tally.arm != arm:
        return _judged(answers.first_failure) or Observation(failed=True)
    if any(not step.startswith(_SAME_MODEL) for step in tally.degraded):
        return Observation(refused=True)  # another model answers, for want of room at this one
    first_s = now_s if tally.first_token_s is None else tally.first_token_s
    between = tally.completion_tokens - 1
    itl_s = sum(tally.gaps_s) / between if tally.gaps_s and between > 0 else None
    return Observation(ttft_s=first_s - tally.started_s, itl_s=itl_s)


def _judged(failure: BaseException | None) -> Observation | None:
    """What a failure says of the version; None: nothing."""
    if isinstance(failure, _ABOUT_OTHERS):
        return None
    if isinstance(failure, CallerError | Refused):
        # Bad requests meet both sides alike; of a version that takes fewer of them there are more.
        return Observation(refused=True)
    return Observation(failed=True)


def _with_tokens(seen: Observation, tokens: int) -> Observation:
    return Observation(ttft_s=seen.ttft_s, itl_s=seen.itl_s, tokens=tokens)
