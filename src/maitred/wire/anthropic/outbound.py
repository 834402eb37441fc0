"""Converts a chat completion to the equivalent Messages request, for servers that speak Anthropic.

This module reverses `maitred.wire.anthropic.inbound` and also applies the stricter rules of Messages: instructions
stand only in ``system``, turns alternate and begin with a user turn, tool results come first in their turn, each text
has at least one character, each call has an id of its own, the schema of a tool is that of an object, and
``max_tokens`` is required.

`maitred.wire.openai.fields` says what becomes of fields that Messages does not have. A temperature above 1, the maximum
of Messages, is reduced to 1, as in Anthropic's own translation (https://platform.claude.com/docs/en/api/openai-sdk).
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.wire.anthropic.content import split_data_url
from maitred.wire.anthropic.requests import (
    Base64Source,
    Block,
    ImageBlock,
    InputMessage,
    MessagesRequest,
    RedactedThinkingBlock,
    RequestMetadata,
    ServerBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolDefinition,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from maitred.wire.openai.requests import ChatRequest, ContentPart, FilePart, FunctionCall, ImageUrl, Message

API_VERSION = "2023-06-01"
"""Sent value of ``anthropic-version``: the last version with `temperature`, `top_p` and `top_k`.

This version has the same events as the newer version.
"""
_HIGHEST_TEMPERATURE = 1.0
_DATA_URL_PREFIX = "data:"
_CALL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""Pattern of the call ids that Messages accepts."""


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
    output_config = _output_config(chat.response_format)
    tools = _tools(chat)
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
        thinking=chat.thinking,
        output_config=output_config,
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


def _output_config(response_format: object) -> dict[str, Any] | None:
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return {"format": {"type": "json_schema", "schema": schema}}
    raise InvalidRequest(
        "response_format must be of the type json_schema, with a schema, or text for this model.",
        param="response_format",
    )


def _turns(messages: Sequence[Message]) -> list[InputMessage]:
    """Converts messages to alternating turns, each with at least one block."""
    turns: list[tuple[str, list[Block]]] = []
    call_ids = CallIds()
    for position, message in enumerate(messages):
        if message.role in ("system", "developer"):
            continue
        role = "assistant" if message.role == "assistant" else "user"
        blocks = list(_blocks(f"messages[{position}]", message, call_ids))
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


def begins_without_thought(messages: Sequence[InputMessage]) -> bool:
    """Returns whether the turn that waits for the results of its tools began with something else than a thought.

    Anthropic refuses such a turn if `thinking` is enabled. It spans all calls and results since the last question.
    """
    first: InputMessage | None = None
    for message in reversed(messages):
        if message.role == "assistant":
            first = message
        elif not any(isinstance(block, ToolResultBlock) for block in message.blocks()):
            break
    return first is not None and not isinstance(first.blocks()[0], ThinkingBlock | RedactedThinkingBlock)


def _turn_content(blocks: list[Block]) -> str | list[Block]:
    match blocks:
        case [TextBlock(text=text)]:
            return text
        case _:
            # Tool results come first in their turn. The sort is stable.
            return sorted(blocks, key=lambda block: not isinstance(block, ToolResultBlock))


class CallIds:
    """Ids of the tool calls of one conversation, as Messages accepts them.

    Other servers give ids that Messages refuses: with other characters, empty, or the same id in every turn. Such an id
    gets a substitute, which depends only on the conversation, so that a server's prefix cache finds it again.
    """

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._waiting: dict[str, list[str]] = {}
        """Given id -> ids of the calls that have it, whose results have not come yet."""
        self._latest: dict[str, str] = {}

    def of_call(self, given: str) -> str:
        """Returns the id of the next call in the conversation, whose given id may be that of an earlier call."""
        call_id = given
        if given in self._used or not _CALL_ID.fullmatch(given):
            digest = hashlib.sha256(f"{len(self._used)} {given}".encode("utf-8", "surrogatepass")).hexdigest()
            call_id = f"toolu_{digest[:24]}"
        self._used.add(call_id)
        self._waiting.setdefault(given, []).append(call_id)
        self._latest[given] = call_id
        return call_id

    def of_result(self, given: str) -> str:
        """Returns the id of the call that a result answers: of several calls with one id, they come in order."""
        waiting = self._waiting.get(given)
        return waiting.pop(0) if waiting else self._latest.get(given, given)


def adapt_history(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the messages of a Messages request without what a server of this API refuses of other models' answers.

    Thoughts without a signature are left out, and so are the members of calls that other APIs have; call ids that
    Messages does not accept get substitutes. Everything else stays as the client wrote it.

    Args:
        messages: Messages as they were written.
    """
    call_ids = CallIds()
    adapted: list[Mapping[str, Any]] = []
    for message in messages:
        if isinstance(message["content"], list):
            blocks = [_adapt_block(block, call_ids) for block in message["content"] if not _is_unsigned_thought(block)]
            if not blocks:
                continue
            message = {**message, "content": blocks}
        adapted.append(message)
    return adapted


def _is_unsigned_thought(block: Mapping[str, Any]) -> bool:
    return block["type"] == "thinking" and not block.get("signature")


def _adapt_block(block: Mapping[str, Any], call_ids: CallIds) -> Mapping[str, Any]:
    match block:
        case {"type": "tool_use", "id": str() as given}:
            members = {name: value for name, value in block.items() if name != "extra_content"}
            return {**members, "id": call_ids.of_call(given)}
        case {"type": "tool_result", "tool_use_id": str() as given}:
            return {**block, "tool_use_id": call_ids.of_result(given)}
    return block


def _blocks(path: str, message: Message, call_ids: CallIds) -> Iterator[Block]:
    if message.role == "assistant" and _tells_blocks(message):
        yield from _server_blocks(message, call_ids)
        return
    content: list[TextBlock | ImageBlock | ServerBlock | ToolUseBlock] = list(_content(path, message))
    if message.role == "assistant":
        # Models write white space before their calls, and Messages refuses it as a text of its own.
        content = [block for block in content if not isinstance(block, TextBlock) or block.text.strip()]
    if message.role in ("tool", "function"):
        result: str | list[TextBlock | ImageBlock | ServerBlock] | None = list(_content(path, message)) or None
        if result and len(result) == 1 and isinstance(result[0], TextBlock):
            result = result[0].text
        given = (message.tool_call_id if message.role == "tool" else message.name) or ""
        is_error = True if message.is_error else None
        yield ToolResultBlock(tool_use_id=call_ids.of_result(given), content=result, is_error=is_error)
        return
    for position, call in enumerate(message.tool_calls or ()):
        call_path = f"{path}.tool_calls[{position}]"
        if call.function is None:
            raise InvalidRequest(f"{call_path} must be of the type function for this model.", param=f"{call_path}.type")
        content.append(_tool_use(f"{call_path}.function", call_ids.of_call(call.id), call.function))
    if message.function_call is not None:
        # The older form has no id: the result names the function.
        call_id = call_ids.of_call(message.function_call.name)
        content.append(_tool_use(f"{path}.function_call", call_id, message.function_call))
    thoughts = list(_thoughts(message))
    for position, block in enumerate(content):
        while thoughts and thoughts[0][0] <= position:
            yield thoughts.pop(0)[1]
        yield block
    yield from (thought for _, thought in thoughts)


def _tells_blocks(message: Message) -> bool:
    """Returns whether a message has the blocks that it was made of; a client may have changed its text since."""
    if not message.content_blocks:
        return False
    texts = [block.get("text") for block in message.content_blocks if block.get("type") == "text"]
    told = message.content or ""
    if isinstance(told, list):
        told = "".join(part.text or "" for part in told)
    return "".join(text for text in texts if isinstance(text, str)) == told


def _server_blocks(message: Message, call_ids: CallIds) -> Iterator[Block]:
    """Yields the blocks of a message as their server wrote them, without unsigned thoughts and empty texts."""
    for block in message.content_blocks or ():
        match block:
            case {"type": "tool_use", "id": str() as given}:
                yield ServerBlock(block={**block, "id": call_ids.of_call(given)})
            case {"type": "thinking", "thinking": str() as thinking, "signature": str() as signature}:
                if signature:
                    yield ThinkingBlock(thinking=thinking, signature=signature)
            case {"type": "redacted_thinking", "data": str() as data}:
                yield RedactedThinkingBlock(data=data)
            case {"type": "text", "text": str() as text} if not text.strip():
                pass
            case {"type": str()}:
                yield ServerBlock(block=block)


def _thoughts(message: Message) -> Iterator[tuple[int, ThinkingBlock | RedactedThinkingBlock]]:
    """Yields the signed thoughts of a message, each with its position among the other blocks.

    Anthropic accepts them only in the order in which they came. Unsigned thoughts are those of other models.
    """
    for block in message.thinking_blocks or ():
        position = block.get("position")
        position = position if isinstance(position, int) else 0
        match block:
            case {"type": "redacted_thinking", "data": str() as data}:
                yield position, RedactedThinkingBlock(data=data)
            case {"signature": str() as signature} if signature:
                yield position, ThinkingBlock(thinking=str(block.get("thinking") or ""), signature=signature)


def _content(path: str, message: Message) -> Iterator[TextBlock | ImageBlock | ServerBlock]:
    if isinstance(message.content, list):
        for position, part in enumerate(message.content):
            if part.type != "text" or part.text:
                yield _part(f"{path}.content[{position}]", part)
    elif text := message.content or message.refusal:
        yield TextBlock(text=text)


def _part(path: str, part: ContentPart) -> TextBlock | ImageBlock | ServerBlock:
    match part:
        case ContentPart(type="text"):
            return TextBlock(text=part.text or "")
        case ContentPart(type="image_url", image_url=ImageUrl(url=url)):
            if not url.startswith(_DATA_URL_PREFIX):
                return ImageBlock(source=UrlSource(url=url))
            media_type, data = _to_base64(f"{path}.image_url.url", url)
            return ImageBlock(source=Base64Source(media_type=media_type, data=data))
        case ContentPart(type="file", file=FilePart(file_data=str() as url, filename=filename)):
            media_type, data = _to_base64(f"{path}.file.file_data", url)
            source = {"type": "base64", "media_type": media_type, "data": data}
            title = {} if filename is None else {"title": filename}
            return ServerBlock(block={"type": "document", **title, "source": source})
    raise InvalidRequest(
        f"{path} has the type {part.type[:64]!r}. This model reads text, image_url, and file with file_data.",
        param=path,
    )


def _to_base64(path: str, url: str) -> tuple[str, str]:
    """Returns the media type and the data of a ``data:`` URL; raises InvalidRequest if it has none of them."""
    split = split_data_url(url)
    if split is None or not split[0]:
        raise InvalidRequest(f"{path} must be a URL, or data:<media type>;base64,<data>.", param=path)
    return split


def _tool_use(path: str, call_id: str, function: FunctionCall) -> ToolUseBlock:
    arguments: Any = {}
    if function.arguments.strip():
        try:
            arguments = msgspec.json.decode(function.arguments)
        except (msgspec.DecodeError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{path}.arguments must be a JSON object for this model.", param=f"{path}.arguments")
    return ToolUseBlock(id=call_id, name=function.name, input=arguments)


def _tools(chat: ChatRequest) -> list[ToolDefinition]:
    tools = [_tool(position, tool) for position, tool in enumerate(chat.tools or ())]
    match chat.tool_choice:
        case {"type": "allowed_tools", "allowed_tools": {"tools": [*allowed]}}:
            names = {_tool(position, tool).name for position, tool in enumerate(allowed)}
            return [tool for tool in tools if tool.name in names]
    return tools


def _tool(position: int, tool: object) -> ToolDefinition:
    match tool:
        case {"type": "function", "function": {"name": str() as name, **rest}}:
            pass
        case _:
            raise InvalidRequest(
                f"tools[{position}] must be of the type function, with a name, for this model.",
                param=f"tools[{position}]",
            )
    description, strict = rest.get("description"), rest.get("strict")
    return ToolDefinition(
        name=name,
        description=description if isinstance(description, str) else None,
        input_schema=to_object_schema(rest.get("parameters")),
        strict=True if strict is True else None,
    )


def to_object_schema(schema: object) -> dict[str, Any]:
    """Returns the schema of a function's parameters with the type that Messages requires.

    OpenAI's API also accepts a schema without a type, and a function without a schema, which has no parameters.
    """
    if not isinstance(schema, dict) or not schema:
        return {"type": "object", "properties": {}}
    return schema if schema.get("type") is not None else {**schema, "type": "object"}


def _tool_choice(chat: ChatRequest) -> ToolChoice | None:
    disable_parallel = True if chat.parallel_tool_calls is False else None
    match chat.tool_choice:
        case None:
            return ToolChoice(type="auto", disable_parallel_tool_use=True) if disable_parallel else None
        case "auto" | {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}:
            return ToolChoice(type="auto", disable_parallel_tool_use=disable_parallel)
        case "none":
            return ToolChoice(type="none")
        case "required" | {"type": "allowed_tools", "allowed_tools": {"mode": "required"}}:
            return ToolChoice(type="any", disable_parallel_tool_use=disable_parallel)
        case {"type": "function", "function": {"name": str() as name}}:
            return ToolChoice(type="tool", name=name, disable_parallel_tool_use=disable_parallel)
        case _:
            raise InvalidRequest(
                "tool_choice must be none, auto, required or name functions for this model.", param="tool_choice"
            )


def _stop_sequences(stops: Sequence[str]) -> list[str] | None:
    if any(not stop.strip() for stop in stops):
        raise InvalidRequest(
            "stop (stop_sequences in Messages) must not be white space alone for this model. Remove it, or add what "
            "stands around it.",
            param="stop",
        )
    return list(stops) or None
