"""Errors of upstreams: maps a server's rejection to the error that the caller gets.

A fault of the request is reported in the server's own words, since only the server knows the rule. Every other error is
a matter between gateway and server: its words go to the log, for they may name accounts and machines that are none of
the caller's business.
"""

import logging
import math
from typing import Any

import msgspec

from maitred.core.errors import (
    ContentRefused,
    ContextLengthExceeded,
    InvalidRequest,
    MaitredError,
    ReplicaBusy,
    ReplicaLost,
    ReplicaUnavailable,
)

log = logging.getLogger(__name__)

_MAX_MESSAGE_CHARACTERS = 500
_REQUEST_FAULT_STATUSES = frozenset({400, 413, 422})
_BUSY_STATUSES = frozenset({408, 409, 425, 429, 503, 529})
_CONTENT_POLICY_CODES = ("content_filter", "content_policy_violation", "content_policy", "responsibleaipolicyviolation")
"""Codes by which OpenAI and Azure name a refusal of content."""
_CONTEXT_LENGTH_PHRASES = (
    *("context length", "context_length", "maximum context", "context window", "context size", "max_model_len"),
)


class ServerError(msgspec.Struct, frozen=True):
    """Error as a server reported it, whatever its shape."""

    message: str = ""
    code: str = ""
    param: str | None = None
    status: int | None = None
    """HTTP status in the error itself; servers put errors into responses that began with 200."""


def parse_error(fields: Any) -> ServerError | None:  # noqa: ANN401 - whatever JSON can be
    """Parses the error in a decoded body or event; None if there is none.

    OpenAI and most others write ``{"error": {"message", "type", "param", "code"}}``, TGI ``{"error": text,
    "error_type"}``, vLLM before 0.9 and SGLang ``{"object": "error", "message", "type", "code"}``, FastAPI's own checks
    ``{"detail": …}``.
    """
    match fields:
        case {"error": dict() as inner}:
            return _parse_error_object(inner)
        case {"error": str() as text}:
            return ServerError(text, str(fields.get("error_type") or ""))
        case {"object": "error"}:
            return _parse_error_object(fields)
        case {"detail": detail}:
            return ServerError(detail if isinstance(detail, str) else msgspec.json.encode(detail).decode())
        case {"error": inner} if inner:
            return ServerError(str(inner))
    return None


def _parse_error_object(fields: dict[str, object]) -> ServerError:
    code, kind, param = fields.get("code"), fields.get("type"), fields.get("param")
    status = code if isinstance(code, int) and 400 <= code < 600 else None
    return ServerError(
        str(fields.get("message") or ""),
        str(kind if status is not None or code is None else code),
        param if isinstance(param, str) else None,
        status,
    )


def make_failure(server: str, status: int, error: ServerError | None, retry_after_s: float | None) -> MaitredError:
    """Makes the error to raise for a server's rejection.

    Args:
        server: Name of the server, for the log.
        status: The HTTP status.
        error: Error in the body.
        retry_after_s: When the server asks for the next attempt.
    """
    message = error.message[:_MAX_MESSAGE_CHARACTERS] if error else ""
    if status in _REQUEST_FAULT_STATUSES and error is not None:
        return _request_error_class(error)(
            message or "The server that runs this model refuses the request.", param=error.param
        )
    log.warning("The upstream %s answered %d: %s", server, status, message or "no reason given")
    if status in (401, 403):
        return ReplicaUnavailable(
            "The server that runs this model does not accept this gateway's credential. Its operator must renew it."
        )
    if status in (404, 405) or 300 <= status < 400:
        return ReplicaUnavailable(
            "The server that runs this model does not know it, or is not where the configuration says. Its operator "
            "must look at the upstream's URL and model."
        )
    if status in _BUSY_STATUSES:
        return ReplicaBusy(
            "The server that runs this model takes no more requests now. Try again after the time in Retry-After.",
            retry_after_s=retry_after_s or 1.0,
        )
    return ReplicaLost()


def _request_error_class(error: ServerError) -> type[InvalidRequest]:
    """Returns the error class of a faulty request."""
    text = f"{error.code} {error.message}".lower()
    if any(words in text for words in _CONTEXT_LENGTH_PHRASES):
        return ContextLengthExceeded
    return ContentRefused if error.code.lower() in _CONTENT_POLICY_CODES else InvalidRequest


def parse_retry_after(retry_after_ms: str | None, retry_after: str | None) -> float | None:
    """Parses the two headers that servers use into seconds; None if neither has a valid number."""
    for text, unit_s in ((retry_after_ms, 0.001), (retry_after, 1.0)):
        try:
            seconds = float(text or "") * unit_s
        except ValueError:
            continue  # a date, which the servers here do not use
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    return None
