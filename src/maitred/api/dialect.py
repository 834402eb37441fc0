"""Dialect of an API: how its errors look, and how its streams end.

A route names its dialect; whatever answers a call (the edge, a recording, a handler) writes in that of its route.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

import msgspec

from maitred.api.errors import Header, error_body, rate_limit_headers
from maitred.core.answer import RequestContext
from maitred.core.counters import CounterState
from maitred.core.errors import (
    BodyTooLarge,
    CallerError,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    LimitReached,
    MaitredError,
    ModelNotFound,
    Refused,
    Unauthenticated,
)
from maitred.wire.anthropic.decode import API_VERSIONS
from maitred.wire.anthropic.responses import ErrorCode, MessagesError, MessagesErrorBody, encode, encode_stream_event
from maitred.wire.openai.responses import ErrorBody
from maitred.wire.sse import DONE, encode_event

_OVERLOADED_STATUS = 529
"""Anthropic's own, for a server that is full; its clients come back after it as after a 429."""


class ApiDialect(Protocol):
    """One API's way to say what is not part of an answer."""

    done: bytes
    """The event after which a stream is complete."""
    error_struct: type[msgspec.Struct]
    """What errors are made from."""
    required_headers: Mapping[str, Sequence[str]]
    """Headers without which no request is taken, and their values."""

    def error(self, error: MaitredError, request_id: str) -> tuple[int, bytes]:
        """Status and body of an error."""
        ...

    def error_event(self, error: MaitredError, request_id: str) -> bytes:
        """The last event of a stream that is broken off."""
        ...

    def head(self, context: RequestContext) -> list[Header]:
        """Returns headers that every answer of this API has, such as the caller's rate limits."""
        ...


class OpenAIDialect:
    """Dialect of OpenAI's API; also of the routes that only maitred has."""

    done = DONE
    error_struct: type[msgspec.Struct] = ErrorBody
    required_headers: Mapping[str, Sequence[str]] = {}

    def error(self, error: MaitredError, request_id: str) -> tuple[int, bytes]:
        """Encodes an error as OpenAI does. The id is in a header."""
        return error.http_status, error_body(error)

    def error_event(self, error: MaitredError, request_id: str) -> bytes:
        """Encodes an error as an event of a stream."""
        return encode_event(error_body(error))

    def head(self, context: RequestContext) -> list[Header]:
        """Returns headers that every answer has, such as the caller's rate limits."""
        return rate_limit_headers(context.rate_limits)


class AnthropicDialect:
    """As Anthropic does it: https://platform.claude.com/docs/en/api/errors and .../api/rate-limits."""

    done = b""
    """An answer's own ``message_stop`` says it."""
    error_struct: type[msgspec.Struct] = MessagesErrorBody
    required_headers: Mapping[str, Sequence[str]] = {"anthropic-version": API_VERSIONS}

    def error(self, error: MaitredError, request_id: str) -> tuple[int, bytes]:
        """Encodes an error as Anthropic does."""
        kind = _type_of(error)
        return _OVERLOADED_STATUS if kind == "overloaded_error" else error.http_status, encode(_body(error, request_id))

    def error_event(self, error: MaitredError, request_id: str) -> bytes:
        """Encodes an error as an event of a stream."""
        return encode_stream_event(_body(error, request_id))

    def head(self, context: RequestContext) -> list[Header]:
        """Returns headers that every answer has, such as the caller's rate limits."""
        headers: list[Header] = [(b"request-id", context.request_id.encode("ascii"))]
        if context.rate_limits is not None:
            now_s = time.time()
            headers += _rate_headers(b"requests", context.rate_limits.requests, now_s)
            headers += _rate_headers(b"tokens", context.rate_limits.tokens, now_s)
        return headers


OPENAI = OpenAIDialect()
ANTHROPIC = AnthropicDialect()


def _body(error: MaitredError, request_id: str) -> MessagesErrorBody:
    # Messages knows no field for what is wrong where; our sentences name it.
    detail = MessagesError(type=_type_of(error), message=error.message, details=ErrorCode(error_code=error.code))
    return MessagesErrorBody(error=detail, request_id=request_id)


def _type_of(error: MaitredError) -> str:
    """Anthropic's coarse class of an error."""
    match error:
        case Unauthenticated():
            return "authentication_error"
        case Forbidden():
            return "permission_error"
        case ModelNotFound():
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


def _rate_headers(what: bytes, reading: CounterState | None, now_s: float) -> list[Header]:
    if reading is None:
        return []
    prefix = b"anthropic-ratelimit-" + what
    reset = datetime.fromtimestamp(now_s + max(0.0, reading.reset_s), UTC).isoformat(timespec="seconds")
    return [
        (prefix + b"-limit", b"%d" % reading.capacity),
        (prefix + b"-remaining", b"%d" % max(0, reading.remaining)),
        (prefix + b"-reset", reset.replace("+00:00", "Z").encode("ascii")),
    ]
