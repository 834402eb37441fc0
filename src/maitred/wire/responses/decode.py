"""Decodes and checks requests of OpenAI's Responses API, with errors that name the client's fields.

This module checks only the rules that a chat completion does not have; the other rules are checked after the conversion
to a chat completion (`maitred.wire.responses.inbound`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from maitred.core.errors import InvalidRequest, Unsupported
from maitred.wire.openai.decode import MAX_TOKEN_ID, FieldSchema, NumberRange, check_cache, check_known
from maitred.wire.openai.decode import body_schemas as openai_schemas
from maitred.wire.openai.faults import DECODE_ERRORS, describe_body_fault, format_value
from maitred.wire.openai.requests import ChatRequest
from maitred.wire.responses.fields import (
    INCLUDES,
    RESPONSES_FIELDS,
    check_includes,
    refuse_field,
    unsupported_fields,
)
from maitred.wire.responses.requests import (
    AddItems,
    CompactRequest,
    ContextManagement,
    CreateConversation,
    InputTokensRequest,
    ItemReference,
    MessageItem,
    ResponsesRequest,
    UpdateConversation,
    tag_items,
)

R = TypeVar("R", ResponsesRequest, InputTokensRequest, CompactRequest)
T = TypeVar("T")
C = TypeVar("C", CreateConversation, UpdateConversation, AddItems)

_TRUNCATIONS = ("disabled", "auto")
_MAX_OUTPUT_TOKENS = NumberRange(1, MAX_TOKEN_ID)
_MAX_TOOL_CALLS = NumberRange(1, MAX_TOKEN_ID)
_COMPACT_THRESHOLD = NumberRange(1, MAX_TOKEN_ID)
_MAX_METADATA = 16
_MAX_METADATA_KEY = 64
_MAX_METADATA_VALUE = 512
_MAX_ID = 64
_MAX_ITEMS = 20
_TOP_LOGPROBS = NumberRange(0, 20)
ROLES = ("user", "assistant", "system", "developer")
"""Roles of the messages in an input."""


def decode_responses(body: bytes, *, strict: bool) -> ResponsesRequest:
    """Decodes the body of a request for a response.

    Args:
        body: The bytes of the body.
        strict: Whether unknown fields are rejected.

    Raises:
        InvalidRequest: The body is malformed, mistyped, out of range or asks for an unsupported feature; `param` says
            where.
    """
    request = _decode(ResponsesRequest, body, strict)
    if request.cache is not None:
        check_cache(request.cache, request.sent)
    _MAX_OUTPUT_TOKENS.check("max_output_tokens", request.max_output_tokens)
    _MAX_TOOL_CALLS.check("max_tool_calls", request.max_tool_calls)
    _TOP_LOGPROBS.check("top_logprobs", request.top_logprobs)
    _check_metadata(request.metadata or {})
    if request.background and request.store is False:
        raise InvalidRequest(
            "background: true needs a response that is stored, because it is read later. Leave store out.",
            param="background",
        )
    if request.beyond_chat is None:
        try:
            check_includes(request.include or ())
        except InvalidRequest as error:
            vars(request)["beyond_chat"] = Unsupported(error.message, param=error.param)
    _check_context_management(request.context_management or ())
    return request


def decode_input_tokens(body: bytes, *, strict: bool) -> InputTokensRequest:
    """Decodes the body of a request to count the tokens of an input, as `decode_responses` does."""
    return _decode(InputTokensRequest, body, strict)


def decode_compact(body: bytes, *, strict: bool) -> CompactRequest:
    """Decodes the body of a request to compact a conversation, as `decode_responses` does."""
    request = _decode(CompactRequest, body, strict)
    if request.cache is not None:
        check_cache(request.cache, request.sent)
    return request


def decode_conversation(body: bytes, kind: type[C], *, strict: bool) -> C:
    """Decodes the body of a request about a conversation, as `decode_responses` does."""
    request, fields = _convert(kind, body or b"{}", "items")
    if strict:
        check_known(fields, kind)
    if isinstance(request, AddItems):
        check_includes(request.include or ())
    else:
        _check_metadata(request.metadata or {})
    if not isinstance(request, UpdateConversation):
        if len(request.items or ()) > _MAX_ITEMS:
            raise InvalidRequest(
                f"items must hold at most {_MAX_ITEMS} at a time; got {len(request.items or ())}.", param="items"
            )
        for position, item in enumerate(request.items or ()):
            if isinstance(item, ItemReference):
                raise InvalidRequest(
                    f"items[{position}] is a reference. Send the item itself.", param=f"items[{position}]"
                )
    return request


def _convert(kind: type[T], body: bytes, items_field: str) -> tuple[T, dict[str, Any]]:
    """Decodes a body to its struct and to its fields as they were written; `items_field` holds items."""
    try:
        fields = tagged = msgspec.json.decode(body)
        if isinstance(fields, dict) and items_field in fields:
            tagged = {**fields, items_field: tag_items(fields[items_field])}
        return msgspec.convert(tagged, kind), fields
    except DECODE_ERRORS as error:
        raise describe_body_fault(error, body) from error


def _decode(kind: type[R], body: bytes, strict: bool) -> R:
    request, fields = _convert(kind, body, "input")
    if strict:
        check_known(fields, kind, also=RESPONSES_FIELDS)
    fields = {name: value for name, value in fields.items() if value is not None}
    unsupported = unsupported_fields(fields, kind)
    vars(request).update(sent=fields, ignored_fields=unsupported.ignored)
    if unsupported.refused:
        vars(request)["beyond_chat"] = refuse_field(unsupported.refused[0])
    _check_input(request)
    return request


def _check_input(request: InputTokensRequest) -> None:
    if not request.model:
        raise InvalidRequest("model must name a model; got an empty string.", param="model")
    if request.input is None and request.previous_response_id is None and request.conversation is None:
        raise InvalidRequest("input is required.", param="input")
    if request.conversation is not None and request.previous_response_id is not None:
        raise InvalidRequest(
            "conversation and previous_response_id exclude each other. Send one of them.", param="previous_response_id"
        )
    if request.conversation_id is not None and not 0 < len(request.conversation_id) <= _MAX_ID:
        raise InvalidRequest(
            f"conversation must be the id of a conversation, of at most {_MAX_ID} characters.", param="conversation"
        )
    if request.previous_response_id is not None and not 0 < len(request.previous_response_id) <= _MAX_ID:
        raise InvalidRequest(
            f"previous_response_id must be the id of a response, of at most {_MAX_ID} characters.",
            param="previous_response_id",
        )
    if request.truncation not in (None, *_TRUNCATIONS):
        raise InvalidRequest(
            f"truncation must be one of {', '.join(_TRUNCATIONS)}; got {format_value(request.truncation)}.",
            param="truncation",
        )
    match None if request.text is None else request.text.format:
        case None | {"type": "text"} | {"type": "json_object"}:
            pass
        case {"type": "json_schema", "schema": dict(), **rest}:
            strict = rest.get("strict")
            if strict is not None and not isinstance(strict, bool):
                raise InvalidRequest(
                    f"text.format.strict must be true or false; got {format_value(strict)}.", param="text.format.strict"
                )
        case other:
            raise InvalidRequest(
                "text.format must be an object of the type text, json_object, or json_schema with a schema; got "
                f"{format_value(other)}.",
                param="text.format",
            )


def _check_context_management(entries: Sequence[ContextManagement]) -> None:
    for position, entry in enumerate(entries):
        path = f"context_management[{position}]"
        if entry.type != "compaction":
            raise InvalidRequest(
                f"{path}.type must be compaction; got {format_value(entry.type)}.", param=f"{path}.type"
            )
        if entry.compact_threshold is not None:
            _COMPACT_THRESHOLD.check(f"{path}.compact_threshold", entry.compact_threshold)


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > _MAX_METADATA:
        raise InvalidRequest(
            f"metadata must have at most {_MAX_METADATA} entries; got {len(metadata)}.", param="metadata"
        )
    for name, value in metadata.items():
        if len(name) > _MAX_METADATA_KEY or len(value) > _MAX_METADATA_VALUE:
            raise InvalidRequest(
                f"metadata must have keys of at most {_MAX_METADATA_KEY} characters and values of at most "
                f"{_MAX_METADATA_VALUE}; {format_value(name)} has more.",
                param="metadata",
            )


def body_schemas() -> dict[type, dict[str, FieldSchema]]:
    """Returns the rules of single fields as JSON Schema, as `maitred.wire.openai.decode.body_schemas` does."""
    chat = openai_schemas()[ChatRequest]
    metadata: dict[str, Any] = {
        "maxProperties": _MAX_METADATA,
        "propertyNames": {"maxLength": _MAX_METADATA_KEY},
        "additionalProperties": {"maxLength": _MAX_METADATA_VALUE},
    }
    prompt: dict[str, FieldSchema] = {
        "model": {"minLength": 1},
        "previous_response_id": {"minLength": 1, "maxLength": _MAX_ID},
        "conversation": {"minLength": 1, "maxLength": _MAX_ID},
        "truncation": {"enum": [*_TRUNCATIONS]},
    }
    items: FieldSchema = {"maxItems": _MAX_ITEMS}
    include: FieldSchema = {"items": {"enum": [*INCLUDES]}}
    return {
        InputTokensRequest: prompt,
        CompactRequest: {
            **{field: rules for field, rules in chat.items() if field in CompactRequest.__struct_fields__},
            **prompt,
        },
        ContextManagement: {"type": {"enum": ["compaction"]}, "compact_threshold": _COMPACT_THRESHOLD.schema()},
        ResponsesRequest: {
            **{field: rules for field, rules in chat.items() if field in ResponsesRequest.__struct_fields__},
            **prompt,
            "top_logprobs": _TOP_LOGPROBS.schema(),
            "max_output_tokens": _MAX_OUTPUT_TOKENS.schema(),
            "max_tool_calls": _MAX_TOOL_CALLS.schema(),
            "metadata": metadata,
            "include": include,
        },
        CreateConversation: {"items": items, "metadata": metadata},
        UpdateConversation: {"metadata": metadata},
        AddItems: {"items": items, "include": include},
        MessageItem: {"role": {"enum": [*ROLES]}},
    }
