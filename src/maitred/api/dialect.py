"""Dialects of the APIs: the format of errors and rate limits in HTTP, and the end of streams.

A route names its dialect; every part that answers its requests uses this dialect (the application, a recorded response,
a handler).

Only this module maps error classes to status codes. Official clients read four things: the status (it decides their
exception class and whether they retry), ``error.type``, ``error.code`` and ``error.param``; and they read the time of a
retry from ``retry-after`` (whole seconds, the HTTP standard) or ``retry-after-ms``. An error that is not a MaitredError
shows the client only the request id: the log has the details under that id.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from maitred.api.compression import ACCEPTED_CODINGS
from maitred.core.context import RateLimitStatus, RequestContext
from maitred.core.counters import CounterState
from maitred.core.errors import (
    BodyTooLarge,
    Bug,
    CallerError,
    ConfigInvalid,
    Conflict,
    ContextLengthExceeded,
    DeadlineExceeded,
    Forbidden,
    LimitReached,
    MaitredError,
    ModelNotFound,
    NotCached,
    QuotaExceeded,
    Refused,
    ResourceNotFound,
    RouteNotFound,
    Unauthenticated,
    UnsupportedBody,
    UpgradeRequired,
)
from maitred.core.limits import LimitKind
from maitred.wire.anthropic.decode import API_VERSIONS
from maitred.wire.anthropic.responses import ErrorCode, MessagesError, MessagesErrorBody, encode_stream_event
from maitred.wire.anthropic.responses import encode as encode_anthropic
from maitred.wire.openai.responses import ErrorBody, ErrorDetail, LimitDetail, encode
from maitred.wire.sse import DONE, encode_event

log = logging.getLogger(__name__)

Header = tuple[bytes, bytes]

_REQUESTS = (b"x-ratelimit-limit-requests", b"x-ratelimit-remaining-requests", b"x-ratelimit-reset-requests")
_TOKENS = (b"x-ratelimit-limit-tokens", b"x-ratelimit-remaining-tokens", b"x-ratelimit-reset-tokens")
"""Headers for the limit, for the remaining amount, and for the time until the full amount is available again."""


def to_public_error(error: Exception, request_id: str) -> MaitredError:
    """Returns the error that may be shown: a MaitredError itself, or a `Bug` without details for others.

    The gateway's own faults are logged here, with their cause.
    """
    if isinstance(error, MaitredError) and not isinstance(error, Bug | ConfigInvalid):
        return error
    log.error("Request %s failed.", request_id, exc_info=error)
    return Bug(f"The server failed. This is not the request's fault; report it with the request id {request_id}.")


def clear_traceback(error: BaseException) -> None:
    """Removes the traceback frames of an error, and those of the errors that led to it.

    Call it where nobody will use the traceback any more. The frames hold the error, among all else that the request
    was, and the error holds them: without this, whoever is refused or hangs up leaves some 130 objects to Python's
    collector of cyclic garbage, and its pauses to others.
    """
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is not None:
            pending += (current.__cause__, current.__context__)
            current.__traceback__ = current.__cause__ = current.__context__ = None


def error_body(error: MaitredError) -> bytes:
    """Returns the error as JSON."""
    detail = ErrorDetail(
        message=_openai_message(error),
        type=_openai_error_type(error),
        param=error.param,
        code=error.code,
        limit=_limit_of(error),
    )
    return encode(ErrorBody(error=detail))


def error_headers(error: MaitredError) -> list[Header]:
    """Returns headers that say when and whether to retry, how to authenticate, to compress and to upgrade."""
    headers: list[Header] = []
    if error.retry_after_s is not None:
        # The time is rounded up: a client that retries early is refused again.
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
        headers.append((b"retry-after-ms", b"%d" % math.ceil(error.retry_after_s * 1000)))
    hopeless = isinstance(error, LimitReached) and (error.retry_after_s is None or not error.retryable)
    if hopeless or isinstance(error, Conflict | NotCached):
        # Official clients retry every 409, 429 and 5xx unless this header tells them not to.
        headers.append((b"x-should-retry", b"false"))
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, UnsupportedBody):
        headers.append((b"accept-encoding", ACCEPTED_CODINGS))
    if isinstance(error, UpgradeRequired):
        headers += [(b"upgrade", b"websocket"), (b"connection", b"upgrade"), (b"sec-websocket-version", b"13")]
    return headers


def rate_limit_headers(rate_limits: RateLimitStatus | None) -> list[Header]:
    """Returns the caller's remaining rate limits as OpenAI's headers."""
    if rate_limits is None:
        return []
    return [*_openai_rate_headers(_REQUESTS, rate_limits.requests), *_openai_rate_headers(_TOKENS, rate_limits.tokens)]


def clamped_headers(max_tokens: int | None) -> list[Header]:
    """Returns a header with the lowered `max_tokens`; empty if it was not lowered."""
    return [] if max_tokens is None else [(b"x-maitred-max-tokens-clamped", b"%d" % max_tokens)]


def _openai_rate_headers(names: tuple[bytes, bytes, bytes], reading: CounterState | None) -> list[Header]:
    if reading is None:
        return []
    limit, remaining, reset = names
    # If an estimate was too low, its settlement can leave a negative rest, which clients cannot handle.
    left = reading.remaining if reading.remaining > 0 else 0
    return [(limit, b"%d" % reading.capacity), (remaining, b"%d" % left), (reset, span_of(reading.reset_s))]


def span_of(seconds: float) -> bytes:
    """Returns a duration in Go's format, which OpenAI sends: ``20ms``, ``1.5s``, ``6m0s``, ``1h0m0s``."""
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


def _openai_message(error: MaitredError) -> str:
    """Returns the message; one about the context window begins with OpenAI's words, by which clients know it."""
    known = "This model's maximum context length is"
    if not isinstance(error, ContextLengthExceeded) or known.lower() in error.message.lower():
        return error.message
    return f"{known} {f'{error.window} tokens' if error.window else 'exceeded'}. {error.message}"


def _anthropic_message(error: MaitredError) -> str:
    """Returns the message; one about the context window begins with Anthropic's words, by which clients know it."""
    known = "prompt is too long"
    if not isinstance(error, ContextLengthExceeded) or known in error.message.lower():
        return error.message
    if not error.window:
        return f"{known}. {error.message}"
    if error.max_tokens is None or error.prompt_tokens > error.window:
        return f"{known}: {error.prompt_tokens} tokens > {error.window} maximum. {error.message}"
    return (
        f"input length and `max_tokens` exceed context limit: {error.prompt_tokens} + {error.max_tokens} > "
        f"{error.window}. {error.message}"
    )


def _openai_error_type(error: MaitredError) -> str:
    """Returns OpenAI's error type, a coarse class of errors."""
    match error:
        case QuotaExceeded():
            return "insufficient_quota"
        case CallerError():
            return "invalid_request_error"
        case Refused():
            return "rate_limit_error"
        case _:
            return "server_error"


_OVERLOADED_STATUS = 529
"""Anthropic's own status for a full server; its clients retry after it as after a 429."""


class ApiDialect(Protocol):
    """Format of the parts of one API's responses that are not the answer itself."""

    done: bytes
    """The event that marks a stream as complete."""
    error_struct: type[msgspec.Struct]
    """The struct of error bodies."""
    required_headers: Mapping[str, Sequence[str]]
    """Headers that a request must have, and their allowed values."""

    def error(self, error: MaitredError, request_id: str) -> tuple[int, bytes]:
        """Returns the status and the body of an error."""
        ...

    def error_event(self, error: MaitredError, request_id: str) -> bytes:
        """Returns the last event of a stream that an error has ended."""
        ...

    def head(self, context: RequestContext) -> list[Header]:
        """Returns headers that every response of this API has, such as the caller's rate limits."""
        ...


class OpenAIDialect:
    """Dialect of OpenAI's API, also used for the routes that only maitred has."""

    done = DONE
    error_struct: type[msgspec.Struct] = ErrorBody
    required_headers: Mapping[str, Sequence[str]] = {}

    def error(self, error: MaitredError, request_id: str) -> tuple[int, bytes]:
        """Encodes an error as OpenAI does. The request id is in a header."""
        return error.http_status, error_body(error)

    def error_event(self, error: MaitredError, request_id: str) -> bytes:
        """Encodes an error as an event of a stream."""
        return encode_event(error_body(error))

    def head(self, context: RequestContext) -> list[Header]:
        """Returns headers that every answer has, such as the caller's rate limits."""
        return rate_limit_headers(context.rate_limits)


class AnthropicDialect:
    """Dialect of Anthropic: https://platform.claude.com/docs/en/api/errors and .../api/rate-limits."""

    done = b""
    """The answer's own ``message_stop`` event marks the stream as complete."""
    error_struct: type[msgspec.Struct] = MessagesErrorBody
    required_headers: Mapping[str, Sequence[str]] = {"anthropic-version": API_VERSIONS}

    def error(self, error: MaitredError, request_id: str) -> tuple[int, bytes]:
        """Encodes an error as Anthropic does."""
        kind = _anthropic_error_type(error)
        return _OVERLOADED_STATUS if kind == "overloaded_error" else error.http_status, encode_anthropic(
            _body(error, request_id)
        )

    def error_event(self, error: MaitredError, request_id: str) -> bytes:
        """Encodes an error as an event of a stream."""
        return encode_stream_event(_body(error, request_id))

    def head(self, context: RequestContext) -> list[Header]:
        """Returns headers that every answer has, such as the caller's rate limits."""
        headers: list[Header] = [(b"request-id", context.request_id.encode("ascii"))]
        if context.rate_limits is not None:
            now_s = time.time()
            headers += _anthropic_rate_headers(b"requests", context.rate_limits.requests, now_s)
            headers += _anthropic_rate_headers(b"tokens", context.rate_limits.tokens, now_s)
        return headers


OPENAI = OpenAIDialect()
ANTHROPIC = AnthropicDialect()


def _body(error: MaitredError, request_id: str) -> MessagesErrorBody:
    # Anthropic's Messages API has no field for the place of a fault; the error message names it.
    detail = MessagesError(
        type=_anthropic_error_type(error), message=_anthropic_message(error), details=ErrorCode(error_code=error.code)
    )
    return MessagesErrorBody(error=detail, request_id=request_id)


def _anthropic_error_type(error: MaitredError) -> str:
    """Returns Anthropic's error type, a coarse class of errors."""
    match error:
        case Unauthenticated():
            return "authentication_error"
        case Forbidden():
            return "permission_error"
        case ModelNotFound() | RouteNotFound() | ResourceNotFound():
            return "not_found_error"
        case BodyTooLarge():
            return "request_too_large"
        case Conflict():
            return "conflict_error"
        case CallerError():
            return "invalid_request_error"
        case LimitReached():
            return "rate_limit_error"
        case Refused():
            return "overloaded_error"
        case DeadlineExceeded():
            return "timeout_error"
        case _:
            return "api_error"


def _anthropic_rate_headers(kind: bytes, reading: CounterState | None, now_s: float) -> list[Header]:
    if reading is None:
        return []
    prefix = b"anthropic-ratelimit-" + kind
    reset = datetime.fromtimestamp(now_s + max(0.0, reading.reset_s), UTC).isoformat(timespec="seconds")
    return [
        (prefix + b"-limit", b"%d" % reading.capacity),
        (prefix + b"-remaining", b"%d" % max(0, reading.remaining)),
        (prefix + b"-reset", reset.replace("+00:00", "Z").encode("ascii")),
    ]
