"""Decodes and checks Messages requests of clients, with errors that name the client's fields.

This module checks only the rules of Messages that a chat completion does not have; the other rules are checked after
the conversion to a chat completion (`maitred.wire.anthropic.inbound`).
"""

import re
from typing import TypeVar

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.wire.anthropic.fields import MESSAGES_FIELDS, refuse_field, unsupported_fields
from maitred.wire.anthropic.requests import (
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    ServerBlock,
    ToolChoice,
    ToolDefinition,
    wrap_server_blocks,
)
from maitred.wire.openai.decode import (
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOKEN_ID,
    FieldSchema,
    NumberRange,
    check_known,
)
from maitred.wire.openai.faults import DECODE_ERRORS, describe_body_fault, format_value

R = TypeVar("R", MessagesRequest, CountTokensRequest)

API_VERSIONS = ("2023-06-01", "2026-10-21")
"""Supported API versions.

The newer version has the same events and does not accept `temperature`, `top_p` or `top_k`; this gateway accepts them
in both versions, because models other than Anthropic's support them
(https://platform.claude.com/docs/en/api/versioning).
"""
_ROLES = ("user", "assistant", "system")
_TOOL_CHOICES = ("auto", "any", "tool", "none")
_CUSTOM_TOOL_TYPES = (None, "custom")
_TEMPERATURE = NumberRange(0, 1)
_TOP_K = NumberRange(0, MAX_TOKEN_ID)
_MAX_TOKENS = NumberRange(1, MAX_TOKEN_ID)
_OTHER_TYPE = re.compile(
    r"Invalid value (?P<quote>['\"])(?P<got>.*)(?P=quote) - at `\$\.(?P<path>[^`]*)\.type`$", re.DOTALL
)
_TYPES = (
    (re.compile(r"\.source$"), "base64 or url"),
    (re.compile(r"\.content\[\d+\]\.content\[\d+\]$"), "text or image"),
    (re.compile(r"\.content\[\d+\]$"), "text, image, tool_use, tool_result, thinking or redacted_thinking"),
    (re.compile(r"^system\[\d+\]$"), "text"),
)
"""Types of blocks and their sources, by the last part of their place."""


def check_version(version: str | None) -> None:
    """Raises InvalidRequest unless the version is supported.

    None means that the header was not sent.
    """
    if version is None:
        raise InvalidRequest(
            f"The header anthropic-version is required. Send anthropic-version: {API_VERSIONS[-1]}.",
            param="anthropic-version",
        )
    if version.strip() not in API_VERSIONS:
        raise InvalidRequest(
            f"anthropic-version must be {' or '.join(API_VERSIONS)}; got {format_value(version)}.",
            param="anthropic-version",
        )


def decode_messages(body: bytes, *, strict: bool) -> MessagesRequest:
    """Decodes the body of a Messages request.

    Args:
        body: The bytes of the body.
        strict: Whether unknown fields are rejected.

    Raises:
        InvalidRequest: The body is malformed, mistyped, out of range or asks for an unsupported feature; `param` says
            where.
    """
    request = _decode(MessagesRequest, body, strict)
    _MAX_TOKENS.check("max_tokens", request.max_tokens)
    _TEMPERATURE.check("temperature", request.temperature)
    _TOP_K.check("top_k", request.top_k)
    _check_stops(request.stop_sequences or ())
    _check_prompt(request)
    return request


def decode_count_tokens(body: bytes, *, strict: bool) -> CountTokensRequest:
    """Decodes the body of a request to count tokens, as `decode_messages` does."""
    request = _decode(CountTokensRequest, body, strict)
    _check_prompt(request)
    return request


def _decode(kind: type[R], body: bytes, strict: bool) -> R:
    try:
        fields = msgspec.json.decode(body)
        request = msgspec.convert(wrap_server_blocks(fields), kind)
    except DECODE_ERRORS as error:
        raise _describe_fault(error, body) from error
    if strict:
        check_known(fields, kind, also=MESSAGES_FIELDS)
    unsupported = unsupported_fields(fields)
    if unsupported.refused:
        raise refuse_field(unsupported.refused[0])
    vars(request)["ignored_fields"] = unsupported.ignored
    return request


def _describe_fault(error: Exception, body: bytes) -> InvalidRequest:
    """Describes a fault as `describe_body_fault` does, and lists the types of blocks where one has another type."""
    if isinstance(error, msgspec.ValidationError) and (match := _OTHER_TYPE.match(str(error))):
        for place, types in _TYPES:
            if place.search(match["path"]):
                return _other_type(match["path"], types, match["got"])
    return describe_body_fault(error, body)


def _other_type(path: str, types: str, got: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path}.type must be {types}; got {format_value(got)}. Write what it holds into a block of the type text.",
        param=f"{path}.type",
    )


def _check_prompt(request: CountTokensRequest) -> None:
    _check_context_edits(request.context_management)
    output_format = request.output_format
    match output_format:
        case None | {"type": "json_schema", "schema": dict()}:
            pass
        case _:
            raise InvalidRequest(
                "output_config.format must be an object with the type json_schema and a schema; got "
                f"{format_value(output_format)}.",
                param="output_config.format",
            )
    if not request.messages:
        raise InvalidRequest("messages must hold at least one message.", param="messages")
    for position, message in enumerate(request.messages):
        if message.role not in _ROLES:
            raise InvalidRequest(
                f"messages[{position}].role must be one of {', '.join(_ROLES)}; got {format_value(message.role)}.",
                param=f"messages[{position}].role",
            )
        if not message.content:
            raise InvalidRequest(
                f"messages[{position}].content must not be empty.", param=f"messages[{position}].content"
            )
        if message.role != "assistant" and not isinstance(message.content, str):
            for index, block in enumerate(message.content):
                if isinstance(block, ServerBlock):  # no client can write one: the type is made by this gateway
                    raise _other_type(f"messages[{position}].content[{index}]", _TYPES[2][1], "server_block")
    last = request.messages[-1]
    # An answer that ended with pause_turn is sent back as it is, and its server goes on with it.
    if last.role == "assistant" and not isinstance(last.blocks()[-1], ServerBlock):
        raise InvalidRequest(
            "messages must end with a message of the role user: this server does not continue an answer that was "
            "begun for it.",
            param="messages",
        )
    _check_tools(request)


def _check_context_edits(management: object) -> None:
    """Raises InvalidRequest for an edit of the context that adds something to the answer.

    The other edits only remove old results and thoughts from the prompt. They are hints: without them the model reads
    more, and answers the same question.
    """
    match management:
        case None | {"edits": None}:
            return
        case dict():
            edits = management.get("edits", [])
        case _:
            edits = None
    if not isinstance(edits, list):
        raise InvalidRequest(
            "context_management must be an object with a list of edits.", param="context_management.edits"
        )
    for position, edit in enumerate(edits):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not isinstance(kind, str) or not kind.startswith("clear_"):
            raise InvalidRequest(
                f"context_management.edits[{position}] must be an edit that clears something, such as "
                f"clear_tool_uses_20250919; got {format_value(kind)}. Remove it.",
                param=f"context_management.edits[{position}]",
            )


def _check_tools(request: CountTokensRequest) -> None:
    for position, tool in enumerate(request.tools or ()):
        if tool.type not in _CUSTOM_TOOL_TYPES:
            raise InvalidRequest(
                f"tools[{position}] is of the type {format_value(tool.type)}, which runs at Anthropic. Remove it, or "
                "define a "
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
    if choice.type not in _TOOL_CHOICES:
        raise InvalidRequest(
            f"tool_choice.type must be one of {', '.join(_TOOL_CHOICES)}; got {format_value(choice.type)}.",
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


def body_schemas() -> dict[type, dict[str, FieldSchema]]:
    """Returns the rules of single fields as JSON Schema, as `maitred.wire.openai.decode.body_schemas` does."""
    stop = {"minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
    prompt: dict[str, FieldSchema] = {
        "model": {"minLength": 1},
        "messages": {"minItems": 1},
    }
    return {
        CountTokensRequest: prompt,
        MessagesRequest: {
            **prompt,
            "max_tokens": _MAX_TOKENS.schema(),
            "temperature": _TEMPERATURE.schema(),
            "top_k": _TOP_K.schema(),
            "top_p": NumberRange(0, 1, excludes_low=True).schema(),
            "stop_sequences": {"maxItems": MAX_STOPS, "items": stop},
            "inference_geo": {"enum": [*MESSAGES_FIELDS["inference_geo"].neutral_values]},
        },
        InputMessage: {"role": {"enum": [*_ROLES]}, "content": {"minLength": 1, "minItems": 1}},
        ToolChoice: {"type": {"enum": [*_TOOL_CHOICES]}},
        ToolDefinition: {"type": {"enum": [kind for kind in _CUSTOM_TOOL_TYPES if kind]}},
    }
