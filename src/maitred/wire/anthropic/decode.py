"""Decodes and checks Messages requests of clients, with errors that name the client's fields.

This module checks only the rules of Messages that a chat completion does not have; the other rules are checked after
the conversion to a chat completion (`maitred.wire.anthropic.inbound`).
"""

import re
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from maitred.core.errors import InvalidRequest, Unsupported
from maitred.wire.anthropic.context_edits import edits_of
from maitred.wire.anthropic.fields import MESSAGES_FIELDS, OPERATOR_FIELDS, refuse_field, unsupported_fields
from maitred.wire.anthropic.requests import (
    CUSTOM_TOOL_TYPES,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    ServerBlock,
    TextBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    is_document,
    wrap_server_blocks,
)
from maitred.wire.openai.decode import (
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOKEN_ID,
    FieldSchema,
    NumberRange,
    check_cache,
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
_BETAS = re.compile(r"[A-Za-z0-9._, -]{0,4096}")
_ROLES = ("user", "assistant", "system")
_TOOL_CHOICES = ("auto", "any", "tool", "none")
_TEMPERATURE = NumberRange(0, 1)
_TOP_K = NumberRange(0, MAX_TOKEN_ID)
_MAX_TOKENS = NumberRange(1, MAX_TOKEN_ID)
_OTHER_SYSTEM_TYPE = re.compile(
    r"Invalid value (?P<quote>['\"])(?P<got>.*)(?P=quote) - at `\$\.(?P<path>system\[\d+\])\.type`$", re.DOTALL
)


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


def check_betas(betas: str | None) -> None:
    """Raises InvalidRequest unless the header is a list of names, as it is passed on to servers of this API.

    None means that the header was not sent.
    """
    if betas is not None and not _BETAS.fullmatch(betas):
        raise InvalidRequest(
            f"anthropic-beta must be names of letters, digits, hyphens and dots, separated by commas; got "
            f"{format_value(betas)}.",
            param="anthropic-beta",
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
    if request.cache is not None:
        check_cache(request.cache, request.sent)
    _MAX_TOKENS.check("max_tokens", request.max_tokens)
    _TEMPERATURE.check("temperature", request.temperature)
    _TOP_K.check("top_k", request.top_k)
    _check_stops(request.stop_sequences or ())
    return request


def decode_count_tokens(body: bytes, *, strict: bool) -> CountTokensRequest:
    """Decodes the body of a request to count tokens, as `decode_messages` does."""
    return _decode(CountTokensRequest, body, strict)


def _decode(kind: type[R], body: bytes, strict: bool) -> R:
    try:
        fields = msgspec.json.decode(body)
        request = msgspec.convert(wrap_server_blocks(fields), kind)
    except DECODE_ERRORS as error:
        raise _describe_fault(error, body) from error
    if strict:
        check_known(fields, kind, also=MESSAGES_FIELDS)
    unsupported = unsupported_fields(fields)
    for name in unsupported.refused:
        if name in OPERATOR_FIELDS:
            raise refuse_field(name)
    _check_prompt(request)
    beyond_chat = refuse_field(unsupported.refused[0]) if unsupported.refused else _find_beyond_chat(request)
    vars(request).update(sent=fields, ignored_fields=unsupported.ignored, beyond_chat=beyond_chat)
    return request


def _describe_fault(error: Exception, body: bytes) -> InvalidRequest:
    """Describes a fault as `describe_body_fault` does, and names the type of blocks in `system`."""
    if isinstance(error, msgspec.ValidationError) and (match := _OTHER_SYSTEM_TYPE.match(str(error))):
        return InvalidRequest(
            f"{match['path']}.type must be text; got {format_value(match['got'])}. Write what it holds into a block of "
            "the type text.",
            param=f"{match['path']}.type",
        )
    return describe_body_fault(error, body)


def _find_beyond_chat(request: CountTokensRequest) -> Unsupported | None:
    """Returns the error for the first thing that no chat completion says; None: there is none."""
    for path, block in _server_blocks_to_read(request.messages):
        if not is_document(block):
            kind = block.block["type"]
            kind += "" if kind != "image" else f" with a source of the type {block.block['source']['type']}"
            return Unsupported(
                f"{path} is of the type {format_value(kind)}, which only a server of Anthropic's API reads. Write what "
                "it holds into a block of the type text.",
                param=f"{path}.type",
            )
    for position, tool in enumerate(request.tools or ()):
        if tool.type not in CUSTOM_TOOL_TYPES:
            return Unsupported(
                f"tools[{position}] is of the type {format_value(tool.type)}, which runs at Anthropic. Remove it, or "
                "define a tool of your own with input_schema.",
                param=f"tools[{position}].type",
            )
    try:
        edits_of(request.context_management)
    except Unsupported as error:
        return error
    return _find_fault_of_begun_answer(request) if request.continues_answer else None


def _find_fault_of_begun_answer(request: CountTokensRequest) -> Unsupported | None:
    """Returns the error for a last message that no model continues, by Anthropic's rules; None: it is continued."""
    path, blocks = f"messages[{len(request.messages) - 1}]", request.messages[-1].blocks()
    last = blocks[-1]
    if not isinstance(last, TextBlock) or any(isinstance(block, ToolUseBlock) for block in blocks):
        return Unsupported(
            f"{path} is the last one and of the role assistant: the model continues its text. End it with a block of "
            "the type text and without calls, or add a message of the role user.",
            param=path,
        )
    if last.text != last.text.rstrip():
        return Unsupported(
            f"{path} must not end with white space, because the model continues it. Remove the white space.", param=path
        )
    return None


def _server_blocks_to_read(messages: Sequence[InputMessage]) -> Iterator[tuple[str, ServerBlock]]:
    """Yields the blocks for servers of this API that no assistant wrote, each with its path."""
    for position, message in enumerate(messages):
        for index, block in enumerate(message.blocks() if message.role != "assistant" else ()):
            path = f"messages[{position}].content[{index}]"
            match block:
                case ServerBlock():
                    yield path, block
                case ToolResultBlock(content=list() as results):
                    for place, result in enumerate(results):
                        if isinstance(result, ServerBlock):
                            yield f"{path}.content[{place}]", result


def _check_prompt(request: CountTokensRequest) -> None:
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
    _check_tools(request)


def _check_tools(request: CountTokensRequest) -> None:
    for position, tool in enumerate(request.tools or ()):
        if tool.type in CUSTOM_TOOL_TYPES and tool.input_schema is None:
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
    }
