"""The degradation ladder: what is tried before a request is refused.

A server beyond its capacity can refuse, or it can give less: a shorter answer, that of a smaller model, or one that
somebody else computes. What a model's callers would rather have than nothing is its operator's choice, step by step,
and a caller may decline all of it.

Each step is tried first on the request as it was asked, and then on top of all steps above it, so that no more is
taken than is needed: with the steps *shorten, model* the order is shortened; the smaller model; the smaller model,
shortened. A step can therefore cost two predictions, and the whole ladder at most twice its length. A request that
goes to a provider is not shortened: there is room.

Nothing is predicted here. Whoever walks the ladder says what an attempt comes to, and the first that is not refused is
what happens.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from maitred.admission.degradation import DegradationStep
from maitred.core.errors import Bug, DeadlineUnmeetable, MaitredError, QueueFull, ReplicaUnavailable
from maitred.core.inference import InferenceRequest

T = TypeVar("T")

DEGRADABLE = (QueueFull, DeadlineUnmeetable, ReplicaUnavailable)
"""The refusals that the ladder may avert. Limits are not among them: they are no question of load."""

NOTHING_TO_TAKE = "nothing_to_take"
"""Reason for a step not to be tried: the request asks for no more than the step would leave."""


class DegradedRequest(msgspec.Struct, frozen=True):
    """A request with less than was asked for."""

    ask: InferenceRequest
    """To be served instead."""
    degraded: tuple[str, ...] = ()
    """What was taken, as `maitred.core.context.RequestContext.degraded` says it."""
    overflows: bool = False
    """Whether it goes to a provider; others that wait may go in its place."""


class DegradationLadder:
    """The steps of one model.

    Args:
        steps: In the order in which they are tried.
        skipped: Told of every step that was no help, by its name and a reason: `NOTHING_TO_TAKE`, or the
            `code` of the error that the attempt met.
    """

    def __init__(
        self,
        steps: Sequence[DegradationStep],
        *,
        skipped: Callable[[str, str], None] = lambda step, reason: None,
    ) -> None:
        self._steps = tuple(steps)
        self._skipped = skipped

    @property
    def overflow_to(self) -> str | None:
        """The model that requests may be sent to while they wait; None: there is no such step."""
        return next((step.to for step in self._steps if step.step == "overflow"), None)

    async def first_that_fits(
        self,
        request: InferenceRequest,
        most_tokens: int,
        refusal: MaitredError,
        attempt: Callable[[DegradedRequest], Awaitable[T]],
    ) -> tuple[DegradedRequest, T]:
        """Walks the ladder down to the first variant that is not refused.

        Args:
            request: What cannot be served as it is.
            most_tokens: What each of its choices would get: `max_tokens`, or what the window and the configured default
                leave where the caller named none.
            refusal: Why it cannot.
            attempt: Reads the variant and predicts what becomes of it; raises a `MaitredError` when that is not
                servable either, also because the smaller model cannot do it at all.

        Returns:
            The variant, and what the attempt at it returned.

        Raises:
            MaitredError: `refusal`, when no step helps, when there is none, or when the caller declines degradation.
        """
        if not request.degradable or not isinstance(refusal, DEGRADABLE):
            raise refusal
        for step, variant in self._variants(request, most_tokens):
            try:
                return variant, await attempt(variant)
            except Bug:
                raise
            except MaitredError as error:
                self._skipped(step, error.code)
        raise refusal

    def _variants(self, request: InferenceRequest, most_tokens: int) -> Iterator[tuple[str, DegradedRequest]]:
        """Each step's name with what it makes of the request; what cannot be tried is skipped."""
        above = request
        tried = {(request.model, request.max_tokens)}
        for step in self._steps:
            if step.step == "overflow" and step.to is not None:
                yield step.step, overflowing(request, step.to)
                continue
            alone, above = _apply_step(step, request, most_tokens), _apply_step(step, above, most_tokens)
            before = len(tried)
            for less in (alone, above):
                if (less.model, less.max_tokens) not in tried:
                    tried.add((less.model, less.max_tokens))
                    yield step.step, DegradedRequest(less, degraded=_changed_fields(request, less))
            if len(tried) == before:
                self._skipped(step.step, NOTHING_TO_TAKE)


def overflowing(request: InferenceRequest, to: str) -> DegradedRequest:
    """The whole request at another model."""
    return DegradedRequest(msgspec.structs.replace(request, model=to), (f"overflow={to}",), overflows=True)


def _apply_step(step: DegradationStep, request: InferenceRequest, most_tokens: int) -> InferenceRequest:
    """The request after a step; itself when the step takes nothing from it."""
    if step.step == "model" and step.to is not None:
        return msgspec.structs.replace(request, model=step.to)
    if step.step == "shorten" and step.to_tokens is not None:
        tokens = max(step.to_tokens, request.sampling.min_tokens)
        if tokens < (most_tokens if request.max_tokens is None else request.max_tokens):
            return msgspec.structs.replace(request, max_tokens=tokens)
    return request


def _changed_fields(asked: InferenceRequest, given: InferenceRequest) -> tuple[str, ...]:
    taken = []
    if given.max_tokens != asked.max_tokens:
        taken.append(f"max_tokens={given.max_tokens}")
    if given.model != asked.model:
        taken.append(f"model={given.model}")
    return tuple(taken)
