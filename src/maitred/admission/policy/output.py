"""Output length of a request from its fields and limits, before anything is counted."""

from collections.abc import Sequence

import msgspec

from maitred.admission.policy.refusal import of_model, whose
from maitred.admission.policy.rules import LimitRule, tightest
from maitred.core.errors import ContextLengthExceeded, InvalidRequest
from maitred.core.limits import LimitKind


class RequestedOutput(msgspec.Struct, frozen=True):
    """Requested output length of a request, with its prompt length."""

    longest_prompt: int
    """Number of tokens of the longest prompt."""
    max_tokens: int | None
    """`max_tokens` from the caller; None: not given."""
    window_left: int
    """Maximum number of tokens that the model's context window leaves for an answer."""
    min_tokens: int = 0
    max_tokens_param: str = "max_tokens"
    prompt_param: str = "prompt"


class OutputLimit(msgspec.Struct, frozen=True):
    """Output tokens that each choice may have."""

    wanted: int
    """The caller's value, or the default if the caller gave none."""
    most: int
    """This value after the limit on output is applied."""


class PerRequestLimits(msgspec.Struct, frozen=True):
    """The limits on single requests; None: no limit of that kind."""

    context: LimitRule | None = None
    output: LimitRule | None = None


def per_request_limits(rules: Sequence[LimitRule]) -> PerRequestLimits:
    """Returns the tightest per-request limits among the limits that apply."""
    return PerRequestLimits(tightest(rules, LimitKind.CONTEXT_TOKENS), tightest(rules, LimitKind.OUTPUT_TOKENS))


def output_limit(wish: RequestedOutput, bounds: PerRequestLimits, default_output_tokens: int | None) -> OutputLimit:
    """Returns the `max_tokens` that a request gets, within the limits that hold for it.

    A limit on the context works like a smaller context window: it lowers a default length, and it refuses an explicit
    length that does not fit. A limit on the output lowers a default length and an explicit length.

    Args:
        wish: Requested output length.
        bounds: Per-request limits that apply to the request.
        default_output_tokens: Output tokens for a request without `max_tokens`; None: as many as fit.

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
