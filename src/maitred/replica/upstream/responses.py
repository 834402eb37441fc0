"""OpenAI's Responses API: encodes requests, with `maitred.wire.responses`."""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from maitred.core.errors import ReplicaUnavailable, Unsupported
from maitred.core.text_replica import TextRequest
from maitred.replica.upstream.errors import ReportedError
from maitred.wire.responses.outbound import native_body

log = logging.getLogger(__name__)

MISSING_STATUSES = frozenset({404, 405})
"""Statuses of a server that has no such API at this URL, or no such model."""


def encode_responses_body(
    request: TextRequest,
    server_model: str,
    parameters: Mapping[str, Any],
    *,
    model: str,
    reads_thoughts: bool,
    reasons: bool,
) -> tuple[bytes, list[str]]:
    """Encodes the body of a request that came in the words of Responses: what the gateway decides is laid over it.

    Args:
        request: The request, with `native`.
        server_model: Name of the model at the server.
        parameters: Default fields of the body.
        model: Name of the model here.
        reads_thoughts: Whether the server reads reasoning that is not encrypted.
        reasons: Whether the model is known to reason.
    """
    assert request.native is not None
    if request.given:
        raise Unsupported("The server that runs this model cannot go on with an answer that another one has begun.")
    body, ignored = native_body(
        request.native.fields, parameters, model=model, reads_thoughts=reads_thoughts, reasons=reasons
    )
    body["model"] = server_model
    if request.max_tokens is not None:
        body["max_output_tokens"] = request.max_tokens
    return msgspec.json.encode(body), ignored


def make_missing_error(server: str, status: int, error: ReportedError) -> ReplicaUnavailable | None:
    """Makes the error for a server that has no Responses API where the configuration says, or no such model.

    Returns:
        None: Something else is missing that the request names, such as a file.
    """
    message = error.message.lower()
    is_of_request = "invalid_request_error" in (error.code, error.kind)
    if status == 404 and is_of_request and not any(word in message for word in ("url", "path", "model")):
        return None
    log.error(
        "The upstream %s answered %d to a request of the Responses API: %s. If it has none, set `responses: false`.",
        server,
        status,
        error.message[:200] or "no reason given",
    )
    return ReplicaUnavailable(
        "The server that runs this model has no Responses API where the configuration says, or does not know the "
        "model. Its operator must look at the upstream's URL, model and `responses`."
    )
