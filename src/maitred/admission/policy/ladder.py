"""The degradation ladder: reductions that are tried before a request is refused.

An overloaded server can refuse requests, or it can give less: a shorter answer, the answer of a smaller model, or the
answer of an external provider. The operator of a model configures the steps, and a caller may decline all of them.

Each step is tried first on the original request, and then in combination with all earlier steps, so that the reduction
is as small as possible. With the steps *shorten, model* the order is: shortened; smaller model; smaller model and
shortened. A step can therefore cost two predictions, and the whole ladder at most twice its length. A request to a
provider keeps its full length, because the provider has room.

This module makes no predictions. The caller evaluates each variant, and the first variant that is not refused is used.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from maitred.admission.degradation import DegradationStep
from maitred.core.errors import Bug, DeadlineUnmeetable, MaitredError, QueueFull, ReplicaUnavailable
from maitred.core.inference import InferenceRequest

T = TypeVar("T")

DEGRADABLE = (QueueFull, DeadlineUnmeetable, ReplicaUnavailable)
"""The refusals that the ladder may avert. Limits are excluded: they do not depend on load."""

NOTHING_TO_TAKE = "nothing_to_take"
"""Reason for skipping a step: the request already asks for no more than the step leaves."""


class DegradedRequest(msgspec.Struct, frozen=True):
    """A reduced variant of a request."""

    ask: InferenceRequest
    """Request to serve instead."""
    degraded: tuple[str, ...] = ()
    """Reductions, in the format of `maitred.core.context.RequestContext.degraded`."""
    overflows: bool = False
    """Whether the request goes to a provider; other waiting requests may go there instead."""


class DegradationLadder:
    """Degradation steps of one model.

    Args:
        steps: The steps in the order in which they are tried.
        skipped: Called for every step that did not help, with its name and a reason: `NOTHING_TO_TAKE`, or the `code`
            of the error of the attempt.
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
        """Model to which waiting requests may be sent; None: there is no such step."""
        return next((step.to for step in self._steps if step.step == "overflow"), None)

    async def first_that_fits(
        self,
        request: InferenceRequest,
        most_tokens: int,
        refusal: MaitredError,
        attempt: Callable[[DegradedRequest], Awaitable[T]],
    ) -> tuple[DegradedRequest, T]:
        """Tries the variants in order until one is not refused.

        Args:
            request: Request that cannot be served unchanged.
            most_tokens: Output tokens that each choice would get: `max_tokens`, or the value from the context window
                and the configured default if the caller named none.
            refusal: Error of the unchanged request.
            attempt: Parses the variant and predicts its result; raises a `MaitredError` if the variant cannot be served
                either, for example because the smaller model does not support it.

        Returns:
            The variant and the result of its attempt.

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
        """Yields the name and the variant of each step; skips steps that cannot be tried."""
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
    """Returns the whole request for another model."""
    return DegradedRequest(msgspec.structs.replace(request, model=to), (f"overflow={to}",), overflows=True)


def _apply_step(step: DegradationStep, request: InferenceRequest, most_tokens: int) -> InferenceRequest:
    """Returns the request after a step, or the request itself if the step changes nothing."""
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
