"""Messages requests from clients: bytes to structs that keep the rules, or InvalidRequest in the caller's own terms.

What is checked here is what Messages asks for beyond a chat completion; the rest is checked once the request has
become one (`maitred.wire.anthropic.inbound`).
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.wire.anthropic.requests import CountTokensRequest, MessagesRequest
from maitred.wire.openai.faults import UNREADABLE, fault_of, shown
from maitred.wire.openai.rules import MAX_STOP_CHARACTERS, MAX_STOPS, NumberRange, check_known

R = TypeVar("R", MessagesRequest, CountTokensRequest)

VERSIONS = ("2023-06-01", "2026-10-21")
"""Of the API. The newer one has the same events and takes neither `temperature` nor `top_p` nor `top_k`; here they are
taken with both, since models that are not Anthropic's know them (https://platform.claude.com/docs/en/api/versioning).
"""
_ROLES = ("user", "assistant", "system")
_CHOICES = ("auto", "any", "tool", "none")
_OUR_TOOLS = (None, "custom")
_TEMPERATURE = NumberRange(0, 1)
_TOP_K = NumberRange(0, 2**31 - 1)
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "context_management": ({}, {"edits": []}),
}
"""Field -> the values that ask for nothing (beside null)."""

_messages = msgspec.json.Decoder(MessagesRequest)
_count = msgspec.json.Decoder(CountTokensRequest)


def check_version(version: str | None) -> None:
    """Raises InvalidRequest unless this is a version that is spoken here; None: the header was not sent."""
    if version is None:
        raise InvalidRequest(
            f"The header anthropic-version is required. Send anthropic-version: {VERSIONS[-1]}.",
            param="anthropic-version",
        )
    if version.strip() not in VERSIONS:
        raise InvalidRequest(
            f"anthropic-version must be {' or '.join(VERSIONS)}; got {shown(version)}.", param="anthropic-version"
        )


def decode_messages(body: bytes, *, strict: bool) -> MessagesRequest:
    """Reads the body of a Messages request.

    Args:
        body: As it came.
        strict: Refuse fields that nobody knows. Costs a second decoding.

    Raises:
        InvalidRequest: Malformed, mistyped, out of range or asking for what is not built yet; `param` says where.
    """
    request = _decoded(_messages, body, strict)
    if request.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1; got {shown(request.max_tokens)}.", param="max_tokens")
    _TEMPERATURE.check("temperature", request.temperature)
    _TOP_K.check("top_k", request.top_k)
    _check_stops(request.stop_sequences or ())
    _check_prompt(request)
    return request


def decode_count(body: bytes, *, strict: bool) -> CountTokensRequest:
    """Reads the body of a question for a conversation's length; as `decode_messages`."""
    request = _decoded(_count, body, strict)
    _check_prompt(request)
    return request


def _decoded(decoder: msgspec.json.Decoder[R], body: bytes, strict: bool) -> R:
    try:
        request = decoder.decode(body)
        if strict:
            check_known(msgspec.json.decode(body), type(request))
    except UNREADABLE as error:
        raise fault_of(error) from error
    return request


def _check_prompt(request: CountTokensRequest) -> None:
    for field, harmless in _UNSUPPORTED.items():
        value = getattr(request, field, None)
        if value is not None and value not in harmless:
            raise InvalidRequest(f"{field} is not supported by this server. Remove it.", param=field)
    wanted = request.output_format
    match wanted:
        case None | {"type": "json_schema", "schema": dict()}:
            pass
        case _:
            raise InvalidRequest(
                f"output_config.format must be an object with the type json_schema and a schema; got {shown(wanted)}.",
                param="output_config.format",
            )
    if not request.messages:
        raise InvalidRequest("messages must hold at least one message.", param="messages")
    for position, message in enumerate(request.messages):
        if message.role not in _ROLES:
            raise InvalidRequest(
                f"messages[{position}].role must be one of {', '.join(_ROLES)}; got {shown(message.role)}.",
                param=f"messages[{position}].role",
            )
        if not message.content:
            raise InvalidRequest(
                f"messages[{position}].content must not be empty.", param=f"messages[{position}].content"
            )
    if request.messages[-1].role == "assistant":
        raise InvalidRequest(
            "messages must end with a message of the role user: this server does not continue an answer that was "
            "begun for it.",
            param="messages",
        )
    _check_tools(request)


def _check_tools(request: CountTokensRequest) -> None:
    for position, tool in enumerate(request.tools or ()):
        if tool.type not in _OUR_TOOLS:
            raise InvalidRequest(
                f"tools[{position}] is of the type {shown(tool.type)}, which runs at Anthropic. Remove it, or define a "
                "tool of your own with input_schema.",
                param=f"tools[{position}].type",
            )
        if tool.input_schema is None:
            raise InvalidRequest(
                f"tools[{position}].input_schema is required.", param=f"tools[{position}].input_schema"
            )
    choice = request.tool_choice
    if choice is None:
        return
    if choice.type not in _CHOICES:
        raise InvalidRequest(
            f"tool_choice.type must be one of {', '.join(_CHOICES)}; got {shown(choice.type)}.",
            param="tool_choice.type",
        )
    if choice.type == "tool" and choice.name is None:
        raise InvalidRequest("tool_choice.name is required with the type tool.", param="tool_choice.name")


def _check_stops(stops: list[str] | tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(
            f"stop_sequences must hold at most {MAX_STOPS} strings; got {len(stops)}.", param="stop_sequences"
        )
    if "" in stops:
        raise InvalidRequest("stop_sequences must not hold an empty string. Remove it.", param="stop_sequences")
    if (longest := max(map(len, stops), default=0)) > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"A stop sequence must have at most {MAX_STOP_CHARACTERS} characters; got {longest}.",
            param="stop_sequences",
        )
