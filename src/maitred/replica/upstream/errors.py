"""Errors of upstreams: maps a server's error response to the error that the caller gets.

If the request is invalid, the caller gets the server's message, because only the server knows the reason. The message
of any other error is only logged, because it may reveal accounts or machines.
"""

import logging
import math
from collections.abc import Sequence
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
_INVALID_REQUEST_STATUSES = frozenset({400, 413, 422})
_BUSY_STATUSES = frozenset({408, 409, 425, 429, 503, 529})
_CONTENT_POLICY_CODES = ("content_filter", "content_policy_violation", "content_policy", "responsibleaipolicyviolation")
"""Error codes of OpenAI and Azure for a violation of the content policy."""
_CONTEXT_LENGTH_PHRASES = (
    *("context length", "context_length", "maximum context", "context window", "context size", "max_model_len"),
)


class ReportedError(msgspec.Struct, frozen=True):
    """Error that a server reported, parsed from any of the known formats."""

    message: str = ""
    code: str = ""
    param: str | None = None
    status: int | None = None
    """HTTP status in the error object, needed if the HTTP status of the response was 200."""


def parse_error(fields: Any) -> ReportedError | None:  # noqa: ANN401 - whatever JSON can be
    """Returns the error in a decoded body or event; None if there is none.

    The formats are ``{"error": {"message", "type", "param", "code"}}`` (OpenAI and most others), ``{"error": text,
    "error_type"}`` (TGI), ``{"object": "error", "message", "type", "code"}`` (SGLang and vLLM before 0.9) and
    ``{"detail": …}`` (validation errors of FastAPI).
    """
    match fields:
        case {"error": dict() as inner}:
            return _parse_error_object(inner)
        case {"error": str() as text}:
            return ReportedError(text, str(fields.get("error_type") or ""))
        case {"object": "error"}:
            return _parse_error_object(fields)
        case {"detail": detail}:
            return ReportedError(detail if isinstance(detail, str) else msgspec.json.encode(detail).decode())
        case {"error": inner} if inner:
            return ReportedError(str(inner))
    return None


def _parse_error_object(fields: dict[str, object]) -> ReportedError:
    code, error_type, param = fields.get("code"), fields.get("type"), fields.get("param")
    status = code if isinstance(code, int) and 400 <= code < 600 else None
    return ReportedError(
        str(fields.get("message") or ""),
        str(error_type if status is not None or code is None else code),
        param if isinstance(param, str) else None,
        status,
    )


def make_response_error(
    server: str, status: int, error: ReportedError | None, retry_after_s: float | None
) -> MaitredError:
    """Makes the exception for a server's error response.

    Args:
        server: Name of the server, for log messages.
        status: HTTP status of the response.
        error: Error in the body; None: the body has none.
        retry_after_s: Time that the server asks to wait before a retry; None: it names none.
    """
    message = error.message[:_MAX_MESSAGE_CHARACTERS] if error else ""
    if status in _INVALID_REQUEST_STATUSES and error is not None:
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


def _request_error_class(error: ReportedError) -> type[InvalidRequest]:
    """Returns the exception class for an invalid request."""
    text = f"{error.code} {error.message}".lower()
    if any(phrase in text for phrase in _CONTEXT_LENGTH_PHRASES):
        return ContextLengthExceeded
    return ContentRefused if error.code.lower() in _CONTENT_POLICY_CODES else InvalidRequest


def parse_retry_after(retry_after_ms: str | None, retry_after: str | None) -> float | None:
    """Returns the retry time in seconds from the two headers; None if neither has a valid number."""
    for text, unit_s in ((retry_after_ms, 0.001), (retry_after, 1.0)):
        try:
            seconds = float(text or "") * unit_s
        except ValueError:
            continue  # a date, which none of the supported servers sends
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    return None


def make_replica_lost(reason: str, error_class: type[ReplicaLost] = ReplicaLost) -> ReplicaLost:
    """Makes a ReplicaLost error; the reason is a note, which is logged but not shown to the caller."""
    failure = error_class()
    failure.add_note(reason)
    return failure


def failure_details(failure: BaseException) -> str:
    """Returns the notes of an exception, or else its message, for log messages."""
    notes: Sequence[str] = getattr(failure, "__notes__", ())
    return "; ".join(notes) or str(failure)
