"""Converts a chat completion to the equivalent Messages request, for servers that speak Anthropic.

This module reverses `maitred.wire.anthropic.inbound` and also applies the stricter rules of Messages: instructions
stand only in ``system``, turns alternate and begin with a user turn, tool results come first in their turn, each text
has at least one character, and ``max_tokens`` is required.

`maitred.wire.openai.fields` says what becomes of fields that Messages does not have. A temperature above 1, the maximum
of Messages, is reduced to 1, as in Anthropic's own translation (https://platform.claude.com/docs/en/api/openai-sdk).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.wire.anthropic.requests import (
    Base64Source,
    Block,
    ImageBlock,
    InputMessage,
    MessagesRequest,
    RequestMetadata,
    TextBlock,
    ToolChoice,
    ToolDefinition,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from maitred.wire.openai.requests import ChatRequest, ContentPart, Message, ToolCall

API_VERSION = "2023-06-01"
"""Sent value of ``anthropic-version``: the last version with `temperature`, `top_p` and `top_k`.

This version has the same events as the newer version.
"""
_HIGHEST_TEMPERATURE = 1.0
_DATA_URL_PREFIX = "data:"


def to_messages(chat: ChatRequest, *, model: str, max_tokens: int) -> MessagesRequest:
    """Builds the Messages request, which asks for a stream.

    With a stream, the gateway notices a server that dies or stalls.

    Args:
        chat: The chat completion.
        model: The server's name of the model.
        max_tokens: Largest number of output tokens; Messages has no default.

    Raises:
        InvalidRequest: Messages cannot express the request; `param` says where.
    """
    tools = [_tool(position, tool) for position, tool in enumerate(chat.tools or ())]
    end_user = chat.safety_identifier or chat.user
    return MessagesRequest(
        model=model,
        max_tokens=max_tokens,
        messages=_turns(chat.messages),
        system=_system(chat.messages),
        tools=tools or None,
        tool_choice=_tool_choice(chat) if tools else None,
        stop_sequences=_stop_sequences(chat.stops),
        temperature=None if chat.temperature is None else min(chat.temperature, _HIGHEST_TEMPERATURE),
        top_p=chat.top_p,
        # Clients write 0 or -1 for "all" ; Messages omits the field instead.
        top_k=chat.top_k if chat.top_k is not None and chat.top_k > 0 else None,
        metadata=RequestMetadata(user_id=end_user) if end_user else None,
        stream=True,
    )


def _system(messages: Sequence[Message]) -> str | list[TextBlock] | None:
    texts = [
        TextBlock(text=text)
        for message in messages
        if message.role in ("system", "developer")
        if (text := message.text())
    ]
    if len(texts) == 1:
        return texts[0].text
    return texts or None


def _turns(messages: Sequence[Message]) -> list[InputMessage]:
    """Converts messages to alternating turns, each with at least one block."""
    turns: list[tuple[str, list[Block]]] = []
    for position, message in enumerate(messages):
        if message.role in ("system", "developer"):
            continue
        role = "assistant" if message.role == "assistant" else "user"
        blocks = list(_blocks(f"messages[{position}]", message))
        if not blocks:
            continue
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    if not turns or turns[0][0] != "user":
        raise InvalidRequest(
            "messages must begin with a message of the role user, after those of the role system, for this model.",
            param="messages",
        )
    return [InputMessage(role=role, content=_turn_content(blocks)) for role, blocks in turns]


def _turn_content(blocks: list[Block]) -> str | list[Block]:
    match blocks:
        case [TextBlock(text=text)]:
            return text
        case _:
            # Tool results come first in their turn. The sort is stable.
            return sorted(blocks, key=lambda block: not isinstance(block, ToolResultBlock))


def _blocks(path: str, message: Message) -> Iterator[Block]:
    content = list(_content(path, message))
    if message.role == "tool":
        result: str | list[TextBlock | ImageBlock] | None = content or None
        if len(content) == 1 and isinstance(content[0], TextBlock):
            result = content[0].text
        yield ToolResultBlock(tool_use_id=message.tool_call_id or "", content=result)
        return
    yield from content
    for position, call in enumerate(message.tool_calls or ()):
        yield _tool_use(f"{path}.tool_calls[{position}]", call)


def _content(path: str, message: Message) -> Iterator[TextBlock | ImageBlock]:
    if isinstance(message.content, list):
        for position, part in enumerate(message.content):
            if part.type != "text" or part.text:
                yield _part(f"{path}.content[{position}]", part)
    elif text := message.content or message.refusal:
        yield TextBlock(text=text)


def _part(path: str, part: ContentPart) -> TextBlock | ImageBlock:
    if part.type == "text":
        return TextBlock(text=part.text or "")
    if part.type != "image_url" or part.image_url is None:
        raise InvalidRequest(
            f"{path} has the type {part.type[:64]!r}. This model reads text and image_url.", param=path
        )
    url = part.image_url.url
    if not url.startswith(_DATA_URL_PREFIX):
        return ImageBlock(source=UrlSource(url=url))
    media_type, base64, data = url.removeprefix(_DATA_URL_PREFIX).partition(";base64,")
    if not base64 or not media_type:
        raise InvalidRequest(
            f"{path}.image_url.url must be a URL, or data:<media type>;base64,<data>.", param=f"{path}.image_url.url"
        )
    return ImageBlock(source=Base64Source(media_type=media_type, data=data))


def _tool_use(path: str, call: ToolCall) -> ToolUseBlock:
    if call.function is None:
        raise InvalidRequest(f"{path} must be of the type function for this model.", param=f"{path}.type")
    arguments: Any = {}
    if call.function.arguments.strip():
        try:
            arguments = msgspec.json.decode(call.function.arguments)
        except (msgspec.DecodeError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(
            f"{path}.function.arguments must be a JSON object for this model.", param=f"{path}.function.arguments"
        )
    return ToolUseBlock(id=call.id, name=call.function.name, input=arguments)


def _tool(position: int, tool: object) -> ToolDefinition:
    match tool:
        case {"type": "function", "function": {"name": str() as name, **rest}}:
            pass
        case _:
            raise InvalidRequest(
                f"tools[{position}] must be of the type function, with a name, for this model.",
                param=f"tools[{position}]",
            )
    description, schema, strict = rest.get("description"), rest.get("parameters"), rest.get("strict")
    return ToolDefinition(
        name=name,
        description=description if isinstance(description, str) else None,
        # A function without a parameter schema has no parameters.
        input_schema=schema if isinstance(schema, dict) else {"type": "object", "properties": {}},
        strict=True if strict is True else None,
    )


def _tool_choice(chat: ChatRequest) -> ToolChoice | None:
    disable_parallel = True if chat.parallel_tool_calls is False else None
    match chat.tool_choice:
        case None:
            return ToolChoice(type="auto", disable_parallel_tool_use=True) if disable_parallel else None
        case "auto":
            return ToolChoice(type="auto", disable_parallel_tool_use=disable_parallel)
        case "none":
            return ToolChoice(type="none")
        case "required":
            return ToolChoice(type="any", disable_parallel_tool_use=disable_parallel)
        case {"type": "function", "function": {"name": str() as name}}:
            return ToolChoice(type="tool", name=name, disable_parallel_tool_use=disable_parallel)
        case _:
            raise InvalidRequest(
                "tool_choice must be none, auto, required or name a function for this model.", param="tool_choice"
            )


def _stop_sequences(stops: Sequence[str]) -> list[str] | None:
    if any(not stop.strip() for stop in stops):
        raise InvalidRequest(
            "stop must not be white space alone for this model. Remove it, or add what stands around it.", param="stop"
        )
    return list(stops) or None
