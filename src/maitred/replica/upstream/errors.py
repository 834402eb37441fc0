"""What a server's refusal means to our caller.

A request's fault is told in the server's own words, since only it knows the rule. Everything else is between us and
the server: its words go to the log, for they may name accounts and machines that are none of the caller's business.
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

_MOST_CHARACTERS = 500
_AT_FAULT = frozenset({400, 413, 422})
_BUSY = frozenset({408, 409, 425, 429, 503, 529})
_POLICY_CODES = ("content_filter", "content_policy_violation", "content_policy", "responsibleaipolicyviolation")
"""What OpenAI and Azure call it."""
_WINDOW_WORDS = (
    *("context length", "context_length", "maximum context", "context window", "context size", "max_model_len"),
)


class ServerError(msgspec.Struct, frozen=True):
    """An error as a server told it, whatever its shape."""

    message: str = ""
    code: str = ""
    param: str | None = None
    status: int | None = None
    """As the error itself has it; servers put errors into answers that began with 200."""


def error_in(fields: Any) -> ServerError | None:  # noqa: ANN401 - whatever JSON can be
    """The error in a decoded body or event; None if it is none.

    OpenAI and most others write ``{"error": {"message", "type", "param", "code"}}``, TGI ``{"error": text,
    "error_type"}``, vLLM before 0.9 and SGLang ``{"object": "error", "message", "type", "code"}``, FastAPI's own checks
    ``{"detail": …}``.
    """
    match fields:
        case {"error": dict() as inner}:
            return _read(inner)
        case {"error": str() as text}:
            return ServerError(text, str(fields.get("error_type") or ""))
        case {"object": "error"}:
            return _read(fields)
        case {"detail": detail}:
            return ServerError(detail if isinstance(detail, str) else msgspec.json.encode(detail).decode())
        case {"error": inner} if inner:
            return ServerError(str(inner))
    return None


def _read(fields: dict[str, object]) -> ServerError:
    code, kind, param = fields.get("code"), fields.get("type"), fields.get("param")
    status = code if isinstance(code, int) and 400 <= code < 600 else None
    return ServerError(
        str(fields.get("message") or ""),
        str(kind if status is not None or code is None else code),
        param if isinstance(param, str) else None,
        status,
    )


def to_failure(server: str, status: int, error: ServerError | None, retry_after_s: float | None) -> MaitredError:
    """What to raise for a refusal.

    Args:
        server: Its name, for the log.
        status: The HTTP status.
        error: What it said.
        retry_after_s: When it wants to be asked again.
    """
    said = error.message[:_MOST_CHARACTERS] if error else ""
    if status in _AT_FAULT and error is not None:
        return _parse_fault(error)(said or "The server that runs this model refuses the request.", param=error.param)
    log.warning("The upstream %s answered %d: %s", server, status, said or "no reason given")
    if status in (401, 403):
        return ReplicaUnavailable(
            "The server that runs this model does not accept this gateway's credential. Its operator must renew it."
        )
    if status in (404, 405) or 300 <= status < 400:
        return ReplicaUnavailable(
            "The server that runs this model does not know it, or is not where the configuration says. Its operator "
            "must look at the upstream's URL and model."
        )
    if status in _BUSY:
        return ReplicaBusy(
            "The server that runs this model takes no more requests now. Try again after the time in Retry-After.",
            retry_after_s=retry_after_s or 1.0,
        )
    return ReplicaLost()


def _parse_fault(error: ServerError) -> type[InvalidRequest]:
    """What is wrong with the request."""
    text = f"{error.code} {error.message}".lower()
    if any(words in text for words in _WINDOW_WORDS):
        return ContextLengthExceeded
    return ContentRefused if error.code.lower() in _POLICY_CODES else InvalidRequest


def parse_retry_after(retry_after_ms: str | None, retry_after: str | None) -> float | None:
    """Seconds, from the two headers that servers use; None if neither has a sound number."""
    for text, unit_s in ((retry_after_ms, 0.001), (retry_after, 1.0)):
        try:
            seconds = float(text or "") * unit_s
        except ValueError:
            continue  # a date, of which the servers here make no use
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    return None
