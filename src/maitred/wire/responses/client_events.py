"""Events that a client sends over a WebSocket of the Responses API, and the messages that answer them there."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.wire.openai.faults import DECODE_ERRORS, describe_body_fault, format_value

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TYPES = ("response.create", "response.steer")
_STEER_MESSAGE = "This server does not steer responses. Send the input with response.create when this one has ended."


class CreateEvent(msgspec.Struct, frozen=True):
    """Event `response.create`, with the body that `POST /v1/responses` has for the same response."""

    body: bytes
    stream_id: str = ""
    """Name of the lane; empty: that of events without one."""
    generate: bool = True
    """Whether an answer is generated; False: only the prompt is prepared."""


class SteerEvent(msgspec.Struct, frozen=True):
    """Event `response.steer` of a client."""

    previous_response_id: str
    input: msgspec.Raw


def decode_client_event(message: bytes) -> CreateEvent | SteerEvent:
    """Decodes an event of a client.

    Raises:
        InvalidRequest: It is no event that this server knows; `param` names the field.
    """
    try:
        fields = _FIELDS.decode(message)
    except DECODE_ERRORS as error:
        raise describe_body_fault(error, message) from error
    kind = _take(fields, "type", str)
    if kind == "response.steer":
        return SteerEvent(_take(fields, "previous_response_id", str) or "", fields.get("input", msgspec.Raw(b"null")))
    if kind != "response.create":
        raise InvalidRequest(f"type must be one of {', '.join(_TYPES)}; got {format_value(kind)}.", param="type")
    stream_id = _take(fields, "stream_id", str)
    if stream_id is not None and not _STREAM_ID.fullmatch(stream_id):
        raise InvalidRequest(
            "stream_id must have 1 to 256 letters, digits, underscores, dots or hyphens.", param="stream_id"
        )
    generate = _take(fields, "generate", bool)
    if _take(fields, "stream", bool) is False:
        raise InvalidRequest("A WebSocket always streams. Leave stream out.", param="stream")
    if _take(fields, "background", bool):
        raise InvalidRequest(
            "A response over a WebSocket does not go on in the background. Send it to POST /v1/responses.",
            param="background",
        )
    body = msgspec.json.encode({**fields, "stream": True})
    return CreateEvent(body, stream_id or "", generate is not False)


def _take(fields: dict[str, msgspec.Raw], name: str, kind: type[Any]) -> Any:  # noqa: ANN401 - of that type
    """Takes a field off the event; None: it is missing or null."""
    value = fields.pop(name, None)
    try:
        return None if value is None else msgspec.json.decode(value, type=kind | None)
    except DECODE_ERRORS as error:
        expected = "true or false" if kind is bool else "a string"
        raise InvalidRequest(f"{name} must be {expected}.", param=name) from error


def encode_error_message(
    status: int,
    error: Mapping[str, Any],
    headers: Mapping[str, str],
    *,
    stream_id: str = "",
    sequence_number: int | None = None,
) -> bytes:
    """Encodes the message about an error.

    Args:
        status: The HTTP status of the error.
        error: The error as in the body of a response of HTTP.
        headers: The headers that such a response would have.
        stream_id: Lane of the turn that failed; empty: none.
        sequence_number: Number of the event in the stream of the response; None: no response has begun.
    """
    message: dict[str, Any] = {"type": "error", "status": status, "error": {**error, "headers": headers}}
    if stream_id:
        message["stream_id"] = stream_id
    if sequence_number is not None:
        message["sequence_number"] = sequence_number
    return msgspec.json.encode(message)


def encode_steer_failure(event: SteerEvent) -> bytes:
    """Encodes the message that the server does not steer, with the input that it has not taken."""
    return msgspec.json.encode(
        {
            "type": "response.steer.failed",
            "sequence_number": 0,
            "error": {"type": "invalid_request_error", "code": "steering_not_supported", "message": _STEER_MESSAGE},
            "steer": {"input": event.input, "previous_response_id": event.previous_response_id},
        }
    )
