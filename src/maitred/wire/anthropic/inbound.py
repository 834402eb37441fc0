"""Converts a client's Messages request to the equivalent chat completion.

=====================  ==============================================================================
Messages               chat completion
=====================  ==============================================================================
``system``             a first message of the role ``system``; such messages elsewhere stay where they are
neighbours of a role   one message, as Anthropic reads them
``tool_use``           ``tool_calls`` of the assistant's message; ``input`` as JSON text
``tool_result``        a message of the role ``tool``, before what else its turn says, with its ``is_error``
``image``              a part ``image_url``, inline images as ``data:`` URLs
``document``           a text, or a part ``file``
``thinking``           ``reasoning_content`` and ``reasoning``; what is signed or encrypted also stays as it is, in
                       ``thinking_blocks``
``tool_choice: any``   ``required``; ``tool`` names the function
other blocks           ``content_blocks`` of the assistant's message, with all blocks of the turn; so are citations
last turn             of the assistant: the beginning of the answer, with ``continue_final_message``
``metadata.user_id``   ``user``
``output_config``      its ``format``: ``response_format``, strict
=====================  ==============================================================================

``thinking`` decides whether the answer shows the reasoning of the model, and is passed on to servers that speak
Messages. Hints without an equivalent (``cache_control``, ``output_config.effort``, ``service_tier``) are ignored and
named; see `maitred.wire.anthropic.fields`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from maitred.core.errors import InvalidRequest
from maitred.core.grammar import Constraint
from maitred.wire.anthropic.outbound import to_object_schema
from maitred.wire.anthropic.requests import (
    CUSTOM_TOOL_TYPES,
    Base64Source,
    Block,
    CountTokensRequest,
    ImageBlock,
    InputMessage,
    MessagesRequest,
    RedactedThinkingBlock,
    ServerBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolDefinition,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from maitred.wire.openai.decode import check_chat
from maitred.wire.openai.fields import MESSAGES_THINKING
from maitred.wire.openai.requests import ChatRequest, ContentPart, FilePart, FunctionCall, ImageUrl, Message, ToolCall
from maitred.wire.openai.written import request_fields


def to_chat(request: CountTokensRequest) -> ChatRequest:
    """Converts a Messages request to a chat completion.

    Args:
        request: A decoded request; if it asks for an answer, the result does too.

    Raises:
        InvalidRequest: The request asks for an unsupported feature; `param` says where.
    """
    parallel = request.tool_choice.disable_parallel_tool_use if request.tool_choice else None
    tools = [_tool(tool) for tool in request.tools or () if tool.type in CUSTOM_TOOL_TYPES]
    chat = ChatRequest(
        model=request.model,
        messages=[*_system_messages(request.system), *_turns(request.messages)],
        tools=tools or None,
        tool_choice=None if request.tools and not tools else _tool_choice(request.tool_choice),
        parallel_tool_calls=False if parallel else None,
        continue_final_message=True if request.continues_answer and request.beyond_chat is None else None,
    )
    if isinstance(request, MessagesRequest):
        chat = msgspec.structs.replace(
            chat,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop=request.stop_sequences or None,
            stream=request.stream,
            user=request.metadata.user_id if request.metadata else None,
            cache=request.cache,
            response_format=_response_format(request),
        )
    check_chat(chat)
    return chat


def to_openai_fields(request: MessagesRequest, chat: ChatRequest) -> Mapping[str, Any]:
    """Returns the fields of the chat completion for a server of another operator.

    Args:
        request: The Messages request.
        chat: The chat completion of `to_chat`.
    """
    fields = request_fields(chat)
    return fields if request.thinking is None else {**fields, MESSAGES_THINKING: request.thinking}


def wants_thinking(request: CountTokensRequest) -> bool:
    """Returns whether the client explicitly asks for the model's thinking."""
    return isinstance(request.thinking, dict) and request.thinking.get("type") in ("enabled", "adaptive")


def to_constraint(request: MessagesRequest) -> Constraint | None:
    """Returns the constraint on the form of the answer, or None if there is none."""
    output_format = request.output_format
    return (
        None
        if output_format is None
        else Constraint("json_schema", output_format["schema"], "output_config.format.schema")
    )


def _response_format(request: MessagesRequest) -> dict[str, Any] | None:
    output_format = request.output_format
    if output_format is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": output_format["schema"], "strict": True}}


def _system_messages(system: str | list[TextBlock] | None) -> Iterator[Message]:
    if system:
        yield Message(role="system", content=system if isinstance(system, str) else [_part(text) for text in system])


def _turns(messages: Sequence[InputMessage]) -> Iterator[Message]:
    for role, blocks in _merge_turns(messages):
        match role:
            case "assistant":
                yield from _assistant_messages(blocks)
            case "system":
                yield Message(role="system", content=_content(blocks) or "")
            case _:
                yield from _user_messages(blocks)


def _merge_turns(messages: Iterable[InputMessage]) -> list[tuple[str, list[Block]]]:
    """Merges adjacent messages of one role into turns, each with all of its blocks."""
    turns: list[tuple[str, list[Block]]] = []
    for message in messages:
        if turns and turns[-1][0] == message.role:
            turns[-1][1].extend(message.blocks())
        else:
            turns.append((message.role, list(message.blocks())))
    return turns


def _user_messages(blocks: Sequence[Block]) -> Iterator[Message]:
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            yield Message(
                role="tool",
                tool_call_id=block.tool_use_id,
                content=_tool_result(block),
                is_error=True if block.is_error else None,
            )
    if content := _content(blocks):
        yield Message(role="user", content=content)


def _tool_result(block: ToolResultBlock) -> str | list[ContentPart]:
    match block.content:
        case None:
            return ""
        case str() as text:
            return text
        case several:
            return _content(several) or ""


def _assistant_messages(blocks: Sequence[Block]) -> Iterator[Message]:
    calls = [
        ToolCall(
            id=block.id,
            function=FunctionCall(name=block.name, arguments=_encode_json(block.input)),
            extra_content=UNSET if block.extra_content is None else block.extra_content,
        )
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    content = _content(block for block in blocks if not isinstance(block, ServerBlock))
    foreign = _content_blocks(blocks)
    if content or calls or foreign:
        thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking]
        thought = "\n\n".join(thoughts) or None
        yield Message(
            role="assistant",
            content=content or (None if calls else ""),
            tool_calls=calls or None,
            reasoning_content=thought,
            reasoning=thought,
            thinking_blocks=_thinking_blocks(blocks) or None,
            content_blocks=foreign,
        )


def _content_blocks(blocks: Sequence[Block]) -> list[dict[str, Any]] | None:
    """Returns all blocks as they were written, if chat completions have no place for one of them, or for citations."""
    foreign = [block for block in blocks if isinstance(block, ServerBlock)]
    cited = [block for block in blocks if isinstance(block, TextBlock) and block.citations]
    if not (foreign or cited):
        return None
    written = [block.block if isinstance(block, ServerBlock) else msgspec.to_builtins(block) for block in blocks]
    return [{name: value for name, value in block.items() if name != "cache_control"} for block in written]


def _thinking_blocks(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Returns the signed and the encrypted thoughts, each with its position among the other blocks."""
    thoughts: list[dict[str, Any]] = []
    position = 0
    for block in blocks:
        match block:
            case RedactedThinkingBlock():
                thoughts.append({**msgspec.to_builtins(block), "position": position})
            case ThinkingBlock():
                if block.signature:
                    thoughts.append({**msgspec.to_builtins(block), "position": position})
            case TextBlock(text=text):
                position += bool(text.strip())
            case _:
                position += 1
    return thoughts


def _content(blocks: Iterable[Block]) -> str | list[ContentPart] | None:
    """Returns the texts, images and documents of the blocks; None if there are none."""
    match [_part(block) for block in blocks if isinstance(block, TextBlock | ImageBlock | ServerBlock)]:
        case []:
            return None
        case [ContentPart(type="text", text=str() as text)]:
            return text
        case parts:
            return parts


def _part(block: TextBlock | ImageBlock | ServerBlock) -> ContentPart:
    match block:
        case TextBlock():
            return ContentPart(type="text", text=block.text)
        case ServerBlock():
            return _document(block.block)
        case ImageBlock(source=Base64Source() as image):
            url = f"data:{image.media_type};base64,{image.data}"
        case ImageBlock(source=UrlSource() as image):
            url = image.url
    return ContentPart(type="image_url", image_url=ImageUrl(url=url))


def _document(block: Mapping[str, Any]) -> ContentPart:
    """Returns a document as a part; any other block is an empty file, for only servers of this API get it."""
    title = block.get("title")
    name = title if isinstance(title, str) else None
    match block.get("source"):
        case {"type": "text", "data": str() as text}:
            return ContentPart(type="text", text=text if name is None else f"{name}\n\n{text}")
        case {"type": "base64", "media_type": str() as media_type, "data": str() as data}:
            file = FilePart(file_data=f"data:{media_type};base64,{data}", filename=name or "document.pdf")
            return ContentPart(type="file", file=file)
    return ContentPart(type="file", file=FilePart())


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = to_object_schema(tool.input_schema)
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    match choice:
        case None:
            return None
        case ToolChoice(type="any"):
            return "required"
        case ToolChoice(type="tool", name=name):
            return {"type": "function", "function": {"name": name}}
        case _:
            return choice.type


def _encode_json(value: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(value).decode("utf-8")
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply. Send a flatter one.") from None
