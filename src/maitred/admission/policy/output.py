"""How many tokens a request may generate, as far as the request alone says: before anything is counted."""

from collections.abc import Sequence

import msgspec

from maitred.admission.policy.refusal import of_model, whose
from maitred.admission.policy.rules import LimitRule, tightest
from maitred.core.errors import ContextLengthExceeded, InvalidRequest
from maitred.core.limits import LimitKind


class RequestedOutput(msgspec.Struct, frozen=True):
    """Length of the output as a request asks for it, with the length of its prompt."""

    longest_prompt: int
    """Tokens of the longest prompt."""
    max_tokens: int | None
    """As the caller named it; None: not at all."""
    window_left: int
    """Most tokens that the model's window leaves for an answer."""
    min_tokens: int = 0
    max_tokens_param: str = "max_tokens"
    prompt_param: str = "prompt"


class OutputLimit(msgspec.Struct, frozen=True):
    """Tokens that each choice may have."""

    wanted: int
    """What the caller named, or what it gets for naming nothing."""
    most: int
    """The same within the limit on output."""


class PerRequestLimits(msgspec.Struct, frozen=True):
    """The limits that bound each request by itself; None: there is none of that kind."""

    context: LimitRule | None = None
    output: LimitRule | None = None


def per_request_limits(rules: Sequence[LimitRule]) -> PerRequestLimits:
    """The tightest bounds among the limits that hold."""
    return PerRequestLimits(tightest(rules, LimitKind.CONTEXT_TOKENS), tightest(rules, LimitKind.OUTPUT_TOKENS))


def output_limit(wish: RequestedOutput, bounds: PerRequestLimits, default_output_tokens: int | None) -> OutputLimit:
    """Returns the `max_tokens` that a request gets, within the limits that hold for it.

    A limit on the context works like a smaller window: it lowers what the caller left open, and refuses what the caller
    named. A limit on the output lowers both.

    Args:
        wish: What the request says.
        bounds: That hold for it.
        default_output_tokens: For a request that names no `max_tokens`; None: as many as fit.

    Raises:
        ContextLengthExceeded: Prompt and answer do not fit a limit on the context.
        InvalidRequest: `min_tokens` cannot be reached.
    """
    left = wish.window_left
    if bounds.context is not None:
        left = min(left, _output_budget(wish, bounds.context))
    wanted = wish.max_tokens
    if wanted is None:
        wanted = left if default_output_tokens is None else min(left, max(default_output_tokens, wish.min_tokens))
    most = wanted
    if bounds.output is not None:
        most = min(wanted, bounds.output.limit.value)
    if most < wish.min_tokens:
        raise InvalidRequest(
            f"min_tokens is {wish.min_tokens:,}, but the limits of this key leave room for {most:,} tokens. Lower it.",
            param="min_tokens",
        )
    return OutputLimit(wanted, most)


def _output_budget(wish: RequestedOutput, context: LimitRule) -> int:
    """Returns the tokens that a limit on the context leaves for the answer."""
    limit = context.limit
    allowed = f"{whose(context.subject)} may use {limit.value:,} for both together{of_model(limit)}"
    left = limit.value - wish.longest_prompt
    if left < 0 or (left == 0 and wish.max_tokens != 0):
        raise ContextLengthExceeded(
            f"The prompt has {wish.longest_prompt:,} tokens and the answer needs some, but {allowed}. "
            + (f"Shorten the prompt to at most {limit.value - 1:,} tokens." if limit.value > 1 else "Have it raised."),
            param=wish.prompt_param,
        )
    if wish.max_tokens is not None and wish.max_tokens > left:
        raise ContextLengthExceeded(
            f"The prompt has {wish.longest_prompt:,} tokens and {wish.max_tokens_param} asks for "
            f"{wish.max_tokens:,} more, but {allowed}. Lower {wish.max_tokens_param} to at most {left:,}, or shorten "
            "the prompt.",
            param=wish.max_tokens_param,
        )
    return left
