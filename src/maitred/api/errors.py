"""Errors as HTTP, in OpenAI's shape; the only place where an error class meets a status line.

Official clients read four things: the status (which picks their exception class and whether they retry),
``error.type``, ``error.code`` and ``error.param``; and when to come back from ``retry-after`` (whole seconds, the HTTP
standard) or ``retry-after-ms``. An error that is not of our tree tells the client nothing but its request id: what
happened is in our log, under that id.
"""

import logging
import math

from maitred.core.errors import Bug, CallerError, ConfigInvalid, MaitredError, Refused
from maitred.wire.openai.responses import ErrorBody, ErrorDetail, encode

log = logging.getLogger(__name__)

Header = tuple[bytes, bytes]


def public(error: Exception, request_id: str) -> MaitredError:
    """What may be told of an error: itself if it is of our tree, else a `Bug` that reveals nothing.

    Faults of ours are logged here, with their cause.
    """
    if isinstance(error, MaitredError) and not isinstance(error, Bug | ConfigInvalid):
        return error
    log.error("Request %s failed.", request_id, exc_info=error)
    return Bug(f"The server failed. This is not the request's fault; report it with the request id {request_id}.")


def body_of(error: MaitredError) -> bytes:
    """The error as JSON."""
    detail = ErrorDetail(message=error.message, type=_type_of(error), param=error.param, code=error.code)
    return encode(ErrorBody(error=detail))


def headers_of(error: MaitredError) -> list[Header]:
    """When and whether to come back, for errors that pass by themselves."""
    headers: list[Header] = []
    if error.retry_after_s is not None:
        # Rounded up: who comes back early is refused again.
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
        headers.append((b"retry-after-ms", b"%d" % math.ceil(error.retry_after_s * 1000)))
    return headers


def _type_of(error: MaitredError) -> str:
    """OpenAI's coarse class of an error."""
    match error:
        case CallerError():
            return "invalid_request_error"
        case Refused():
            return "rate_limit_error"
        case _:
            return "server_error"
