"""Errors as HTTP, in OpenAI's shape; the only place where an error class meets a status line.

Official clients read four things: the status (which picks their exception class and whether they retry),
``error.type``, ``error.code`` and ``error.param``; and when to come back from ``retry-after`` (whole seconds, the HTTP
standard) or ``retry-after-ms``. An error that is not of our tree tells the client nothing but its request id: what
happened is in our log, under that id.
"""

import logging
import math

from msgspec import UNSET, UnsetType

from maitred.core.answer import RateLimitStatus
from maitred.core.counters import CounterState
from maitred.core.errors import (
    Bug,
    CallerError,
    ConfigInvalid,
    Conflict,
    LimitReached,
    MaitredError,
    QuotaExceeded,
    Refused,
    Unauthenticated,
)
from maitred.core.limits import LimitKind
from maitred.wire.openai.responses import ErrorBody, ErrorDetail, LimitDetail, encode

log = logging.getLogger(__name__)

Header = tuple[bytes, bytes]

_REQUESTS = (b"x-ratelimit-limit-requests", b"x-ratelimit-remaining-requests", b"x-ratelimit-reset-requests")
_TOKENS = (b"x-ratelimit-limit-tokens", b"x-ratelimit-remaining-tokens", b"x-ratelimit-reset-tokens")
"""How much in all, how much of it is left, and when all of it will be."""


def to_public_error(error: Exception, request_id: str) -> MaitredError:
    """Returns the error that may be shown: itself if it is of our tree, else a `Bug` that reveals nothing.

    Faults of ours are logged here, with their cause.
    """
    if isinstance(error, MaitredError) and not isinstance(error, Bug | ConfigInvalid):
        return error
    log.error("Request %s failed.", request_id, exc_info=error)
    return Bug(f"The server failed. This is not the request's fault; report it with the request id {request_id}.")


def clear_traceback(error: BaseException) -> None:
    """Drops the frames that an error was raised through, and the errors that led to it with theirs.

    To be called where nobody will ask for them any more. The frames hold the error, among all else that the request
    was, and the error holds them: without this, whoever is refused or hangs up leaves some 130 objects to Python's
    collector of cyclic garbage, and its pauses to others.
    """
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None:
            pending += (one.__cause__, one.__context__)
            one.__traceback__ = one.__cause__ = one.__context__ = None


def error_body(error: MaitredError) -> bytes:
    """The error as JSON."""
    detail = ErrorDetail(
        message=error.message, type=_type_of(error), param=error.param, code=error.code, limit=_limit_of(error)
    )
    return encode(ErrorBody(error=detail))


def error_headers(error: MaitredError) -> list[Header]:
    """When and whether to come back, and how to say who one is."""
    headers: list[Header] = []
    if error.retry_after_s is not None:
        # Rounded up: who comes back early is refused again.
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
        headers.append((b"retry-after-ms", b"%d" % math.ceil(error.retry_after_s * 1000)))
    hopeless = isinstance(error, LimitReached) and (error.retry_after_s is None or not error.retryable)
    if hopeless or isinstance(error, Conflict):
        # Official clients retry every 409 and 429 unless they are told that it cannot help.
        headers.append((b"x-should-retry", b"false"))
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def rate_limit_headers(rate_limits: RateLimitStatus | None) -> list[Header]:
    """How much of its rates a caller has left, as OpenAI writes it."""
    if rate_limits is None:
        return []
    return [*_rate_headers(_REQUESTS, rate_limits.requests), *_rate_headers(_TOKENS, rate_limits.tokens)]


def clamped_headers(max_tokens: int | None) -> list[Header]:
    """Says that `max_tokens` was lowered to this; nothing if it was not."""
    return [] if max_tokens is None else [(b"x-maitred-max-tokens-clamped", b"%d" % max_tokens)]


def _rate_headers(names: tuple[bytes, bytes, bytes], reading: CounterState | None) -> list[Header]:
    if reading is None:
        return []
    limit, remaining, reset = names
    # Settling an estimate that was too low leaves less than nothing, for which clients are not prepared.
    left = reading.remaining if reading.remaining > 0 else 0
    return [(limit, b"%d" % reading.capacity), (remaining, b"%d" % left), (reset, span_of(reading.reset_s))]


def span_of(seconds: float) -> bytes:
    """A time span as Go writes it, which is what OpenAI sends: ``20ms``, ``1.5s``, ``6m0s``, ``1h0m0s``."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return b"%dms" % milliseconds if milliseconds > 0 else b"0s"
    minutes, rest_ms = divmod(milliseconds, 60_000)
    hours, minutes_left = divmod(minutes, 60)
    text = f"{rest_ms / 1000:g}s"
    if minutes:
        text = f"{minutes_left}m{text}"
    return f"{hours}h{text}".encode("ascii") if hours else text.encode("ascii")


def _limit_of(error: MaitredError) -> LimitDetail | UnsetType:
    if not isinstance(error, LimitReached):
        return UNSET
    reading = error.counter_state
    return LimitDetail(
        scope=error.subject,
        limit=error.limit,
        value=error.value,
        used=reading.used,
        remaining=max(0, reading.remaining),
        reset_s=None if error.limit == LimitKind.USD_TOTAL else round(reading.reset_s, 3),
    )


def _type_of(error: MaitredError) -> str:
    """OpenAI's coarse class of an error."""
    match error:
        case QuotaExceeded():
            return "insufficient_quota"
        case CallerError():
            return "invalid_request_error"
        case Refused():
            return "rate_limit_error"
        case _:
            return "server_error"
