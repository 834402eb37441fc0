"""Converts a client's request for a response to the equivalent chat completion.

==============================  ============================================================================
Responses                       chat completion
==============================  ============================================================================
``instructions``                a first message of the role ``system``
``message``                     a message; neighbours of one assistant's turn are one message
``function_call``               ``tool_calls`` of the assistant's message
``custom_tool_call``            the same, with the type ``custom``
``function_call_output``, ...   a message of the role ``tool``
``reasoning``                   ``reasoning_content`` and ``reasoning`` of the assistant's message; blocks of thoughts
                                that came as ``encrypted_content`` are ``thinking_blocks``
``compaction``                  messages of its window, in place of the items before it
``tools``                       ``tools``; a tool that runs at a provider is left out and named
``tool_choice: allowed_tools``  only these tools
``text.format``                 ``response_format``
``reasoning.effort``            ``reasoning_effort``
``max_output_tokens``           ``max_completion_tokens``
==============================  ============================================================================

What a client writes back of tools that ran at a provider, such as ``web_search_call``, says nothing to another model:
it is left out and named. What no chat completion can say, such as ``computer_call_output``, is refused by every model
but those whose servers speak Responses, which get the request as it was written.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from maitred.core.errors import InvalidRequest, Unsupported
from maitred.wire.openai.decode import check_chat
from maitred.wire.openai.faults import format_value
from maitred.wire.openai.requests import (
    ChatRequest,
    ContentPart,
    CustomCall,
    FilePart,
    FunctionCall,
    ImageUrl,
    Message,
    ToolCall,
)
from maitred.wire.responses.compaction import (
    SUMMARY_REQUEST,
    CompactedWindow,
    is_instruction,
    is_user_message,
    summary_message,
)
from maitred.wire.responses.decode import ROLES
from maitred.wire.responses.requests import (
    ITEM_TYPES,
    SERVER_CALLS,
    AssistantRefusal,
    AssistantText,
    CompactionItem,
    CompactRequest,
    CustomCallItem,
    CustomResultItem,
    FunctionCallItem,
    FunctionResultItem,
    InputContent,
    InputFile,
    InputImage,
    InputItem,
    InputText,
    InputTokensRequest,
    ItemReference,
    MessageItem,
    PlainText,
    ReasoningInput,
    ResponsesRequest,
    ServerItem,
    decode_thoughts,
    find_foreign_part,
)

_PARAMS: Mapping[str, str] = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": "include",
}
"""Field of a chat completion -> field of a request for a response."""
_STORED = "conversation"
"""Place of all items of a stored conversation."""
SUMMARY_PLACE = "summary"
"""Place of the message with a summary, which stands nowhere in the request."""
_CUSTOM_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of the function that stands for a custom tool, for models that know functions only."""


def rename_param(field: str) -> str:
    """Returns the field of a request for a response that a field of its chat completion comes from."""
    for chat_field, name in _PARAMS.items():
        if field == chat_field or field.startswith((f"{chat_field}.", f"{chat_field}[")):
            return name + field[len(chat_field) :]
    return field


def to_chat(
    request: InputTokensRequest, earlier: Sequence[InputItem] = (), window: CompactedWindow | None = None
) -> ChatRequest:
    """Converts a request for a response to a chat completion.

    Args:
        request: A decoded request; if it asks for an answer, the result does too.
        earlier: Items of the conversation before the request's own.
        window: What the last compaction item of the conversation stands for; None: there is none.

    Raises:
        InvalidRequest: The request asks for an unsupported feature; `param` says where.
    """
    chat, beyond_chat = convert_to_chat(request, earlier, window)
    if beyond_chat is not None:
        raise beyond_chat
    return chat


def convert_to_chat(
    request: InputTokensRequest, earlier: Sequence[InputItem] = (), window: CompactedWindow | None = None
) -> tuple[ChatRequest, Unsupported | None]:
    """Converts as much of a request for a response to a chat completion as one can say.

    Args:
        request: A decoded request; if it asks for an answer, the result does too.
        earlier: Items of the conversation before the request's own.
        window: What the last compaction item of the conversation stands for; None: there is none.

    Returns:
        The chat completion, and the error for the first thing that it does not say; None: it says all.

    Raises:
        InvalidRequest: The request is at fault, whoever reads it; `param` says where.
    """
    beyond: list[Unsupported] = [] if request.beyond_chat is None else [request.beyond_chat]
    tools, tool_choice = _tools(request, beyond)
    chat = ChatRequest(
        model=request.model,
        messages=_messages(request, earlier, window, beyond),
        tools=tools or None,
        tool_choice=tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
    )
    if isinstance(request, ResponsesRequest):
        with_logprobs = "message.output_text.logprobs" in request.includes
        chat = msgspec.structs.replace(
            chat,
            max_completion_tokens=request.max_output_tokens,
            **{name: getattr(request, name) for name in _SAME_FIELDS},
            logprobs=True if with_logprobs else None,
            top_logprobs=request.top_logprobs if with_logprobs else None,
            response_format=_response_format(request),
            verbosity=None if request.text is None else request.text.verbosity,
        )
    elif isinstance(request, CompactRequest):
        same = [name for name in _SAME_FIELDS if name in CompactRequest.__struct_fields__]
        chat = msgspec.structs.replace(chat, **{name: getattr(request, name) for name in same})
    try:
        check_chat(chat)
    except InvalidRequest as error:
        if error.param is None or (param := rename_param(error.param)) == error.param:
            raise
        raise InvalidRequest(error.message.replace(error.param, param), param=param) from None
    return chat, beyond[0] if beyond else None


_SAME_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "stop", "stream", "service_tier", "priority", "user", "safety_identifier", "prompt_cache_key"),
    *("chat_template_kwargs", "cache"),
)
"""Fields that have the same name and meaning in both."""


_OF_THE_ANSWER = (
    *("max_completion_tokens", "stop", "stream", "logprobs", "top_logprobs", "response_format", "verbosity"),
    "parallel_tool_calls",
)
"""Fields that a summary before the answer does not share with it."""


def custom_tools(chat: ChatRequest) -> frozenset[str]:
    """Returns the names of the tools of a converted request whose input is a text."""
    return frozenset(tool["custom"]["name"] for tool in chat.tools or () if tool["type"] == "custom")


def with_functions_only(chat: ChatRequest) -> ChatRequest:
    """Returns the chat completion for a model that knows functions only: each custom tool is a function of a text."""
    tools = [_as_function(tool) for tool in chat.tools or ()]
    choice = chat.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "custom":
        choice = {"type": "function", "function": choice["custom"]}
    return msgspec.structs.replace(chat, tools=tools or None, tool_choice=choice)


def drop_oldest_turns(chat: ChatRequest, share: float) -> ChatRequest | None:
    """Returns the chat completion without the oldest turns of its conversation, as `truncation: auto` asks for.

    A turn begins with a message of the user. Instructions before the first turn stay, and so does the last turn.

    Args:
        chat: The chat completion.
        share: Share of the conversation's text that may stay; at least one turn is dropped.

    Returns:
        None if there is only one turn.
    """
    starts = [position for position, message in enumerate(chat.messages) if message.role == "user"]
    if len(starts) < 2:
        return None
    sizes = [_size_of(message) for message in chat.messages]
    allowed = share * sum(sizes)
    kept = sum(sizes[: starts[0]])
    start = next((start for start in starts[1:] if kept + sum(sizes[start:]) <= allowed), starts[-1])
    return msgspec.structs.replace(chat, messages=[*chat.messages[: starts[0]], *chat.messages[start:]])


def _size_of(message: Message) -> int:
    return len(message.text()) + sum(len(call.function.arguments) for call in message.tool_calls or () if call.function)


def _as_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if tool["type"] != "custom":
        return tool
    described = {name: tool["custom"][name] for name in ("name", "description") if name in tool["custom"]}
    return {"type": "function", "function": {**described, "parameters": _CUSTOM_PARAMETERS, "strict": True}}


def _response_format(request: ResponsesRequest) -> Any:  # noqa: ANN401 - JSON
    match None if request.text is None else request.text.format:
        case {"type": "json_schema", **rest}:
            named = {name: rest[name] for name in ("name", "description", "schema", "strict") if name in rest}
            return {"type": "json_schema", "json_schema": {"name": "answer", **named}}
        case {"type": "json_object"}:
            return {"type": "json_object"}
    return None


def conversation_items(
    request: InputTokensRequest, earlier: Sequence[InputItem], window: CompactedWindow | None
) -> list[tuple[str, InputItem]]:
    """Returns the items that the model reads, each with its place for messages about it; see `to_chat`."""
    own = [(f"input[{position}]", item) for position, item in enumerate(request.items())]
    items = [*((_STORED, item) for item in earlier), *own]
    if window is None:
        return items
    at = max(position for position, (_, item) in enumerate(items) if isinstance(item, CompactionItem))
    kept = [
        (path, item)
        for path, item in items[:at]
        if is_instruction(item) or (is_user_message(item) and not window.replaces_user_messages)
    ]
    known = [_role_and_text(item) for _, item in kept]
    instructions = [item for item in window.instructions if _role_and_text(item) not in known]
    place = items[at][0]
    return [
        *((place, item) for item in instructions),
        *kept,
        *((place, item) for item in window.before),
        (SUMMARY_PLACE, summary_message(window)),
        *((place, item) for item in window.after),
        *items[at + 1 :],
    ]


def _role_and_text(item: InputItem) -> tuple[str, object] | None:
    """Returns what a message says, however its content is written; None for another item."""
    return (item.role, _content(item.content, "content", [])) if isinstance(item, MessageItem) else None


def _messages(
    request: InputTokensRequest, earlier: Sequence[InputItem], window: CompactedWindow | None, beyond: list[Unsupported]
) -> list[Message]:
    messages = [] if not request.instructions else [Message(role="system", content=request.instructions)]
    converted = _convert_items(conversation_items(request, earlier, window), beyond)
    # Templates of some models refuse two messages of the user in a row, which a window has.
    messages += converted if window is None else _merge_user_messages(converted)
    if all(message.role in ("system", "developer") for message in messages):
        messages.append(Message(role="user", content=""))  # a client that only tries the connection sends no items
    return messages


def _merge_user_messages(messages: Iterable[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        if merged and message.role == merged[-1].role == "user":
            merged[-1] = msgspec.structs.replace(message, content=_join(merged[-1].content, message.content))
        else:
            merged.append(message)
    return merged


def _join(*contents: str | list[ContentPart] | None) -> str | list[ContentPart]:
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(map(str, contents))
    parts: list[ContentPart] = []
    for content in contents:
        parts += [ContentPart(type="text", text=content)] if isinstance(content, str) else content or []
    return parts


def summary_chat(chat: ChatRequest) -> ChatRequest:
    """Returns the chat completion that summarises the conversation of another one, as text and without calls."""
    return msgspec.structs.replace(
        chat,
        messages=_merge_user_messages([*chat.messages, Message(role="user", content=SUMMARY_REQUEST)]),
        tool_choice="none" if chat.tools else None,
        **dict.fromkeys(_OF_THE_ANSWER),
    )


def check_items(items: Sequence[InputItem]) -> None:
    """Raises InvalidRequest for the first item that not every model could have in its conversation."""
    beyond: list[Unsupported] = []
    _convert_items([(f"items[{position}]", item) for position, item in enumerate(items)], beyond)
    if beyond:
        raise beyond[0]


def unread_items(earlier: Iterable[InputItem]) -> tuple[str, ...]:
    """Returns the names of the items in a stored conversation that a chat completion leaves out.

    The client has no way to leave them out itself.
    """
    kinds = [str(item.item["type"]) for item in earlier if isinstance(item, ServerItem)]
    return tuple(dict.fromkeys(f"conversation ({kind[:64]})" for kind in kinds))


def _convert_items(items: Iterable[tuple[str, InputItem]], beyond: list[Unsupported]) -> list[Message]:
    """Returns items as messages of a chat completion.

    Args:
        items: Each item with its place, for messages about it.
        beyond: Gets the errors for what chat completions cannot say.
    """
    messages: list[Message] = []
    turn = _AssistantTurn()
    for path, item in items:
        if not turn.add(item, path):
            messages += turn.messages()
            turn = _AssistantTurn()
            messages += _message(item, path, beyond)
    messages += turn.messages()
    return messages


class _AssistantTurn:
    """Neighbouring items of the assistant, which are one message of a chat completion."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._refusals: list[str] = []
        self._calls: list[ToolCall] = []
        self._thoughts: list[str] = []
        self._blocks: list[dict[str, Any]] = []

    def add(self, item: InputItem, path: str) -> bool:
        """Adds an item; returns whether it belongs to the turn of an assistant."""
        match item:
            case MessageItem(role="assistant", content=content):
                for text, is_refusal in _texts_of(content, f"{path}.content"):
                    (self._refusals if is_refusal else self._texts).append(text)
            case FunctionCallItem():
                extra = UNSET if item.extra_content is None else item.extra_content
                function = FunctionCall(item.name, item.arguments)
                self._calls.append(ToolCall(item.call_id, function, extra_content=extra))
            case CustomCallItem():
                self._calls.append(ToolCall(item.call_id, type="custom", custom=CustomCall(item.name, item.input)))
            case ReasoningInput():
                blocks = decode_thoughts(item.encrypted_content)
                texts = [part.text for part in item.content or item.summary or ()]
                self._thoughts += texts or [block["thinking"] for block in blocks if "thinking" in block]
                self._blocks += [block for block in blocks if "signature" in block or "data" in block]
            case ServerItem(item={"type": kind}) if kind in SERVER_CALLS or path == _STORED:
                pass  # it is left out and named
            case _:
                return False
        return True

    def messages(self) -> list[Message]:
        """Returns the message of the turn; empty if it says nothing."""
        if not (self._texts or self._refusals or self._calls):
            return []
        thought = "\n\n".join(self._thoughts) or None
        text = "\n".join(self._texts)
        return [
            Message(
                role="assistant",
                content=text if text or not (self._calls or self._refusals) else None,
                refusal="\n".join(self._refusals) or None,
                tool_calls=self._calls or None,
                reasoning_content=thought,
                reasoning=thought,
                thinking_blocks=self._blocks or None,
            )
        ]


def _message(item: InputItem, path: str, beyond: list[Unsupported]) -> Iterable[Message]:
    match item:
        case MessageItem(role=role, content=content):
            if role not in ROLES:
                raise InvalidRequest(
                    f"{path}.role must be one of {', '.join(ROLES)}; got {format_value(role)}.", param=f"{path}.role"
                )
            yield Message(role=role, content=_content(content, f"{path}.content", beyond))
        case FunctionResultItem() | CustomResultItem():
            output = _content(item.output, f"{path}.output", beyond)
            yield Message(role="tool", tool_call_id=item.call_id, content=output)
        case CompactionItem():
            raise InvalidRequest(
                f"{path}.encrypted_content was not made by this server, which cannot read it. Send the items that it "
                "stands for.",
                param=f"{path}.encrypted_content",
            )
        case ItemReference():
            raise InvalidRequest(
                f"{path} refers to {format_value(item.id)}, which is no item of previous_response_id. Send the item "
                "itself.",
                param=path,
            )
        case ServerItem(item=foreign):
            kind, param = foreign["type"], path
            if kind in ITEM_TYPES and (part := find_foreign_part(foreign)) is not None:
                path, kind = f"{path}.{part[0]}", part[1]
                param = f"{path}.type"
            beyond.append(
                Unsupported(
                    f"{path} is of the type {format_value(kind)}, which only a server of the Responses API reads. Send "
                    "what it holds as a message.",
                    param=param,
                )
            )


def _content(content: str | list[InputContent], path: str, beyond: list[Unsupported]) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    match [_part(part, f"{path}[{position}]", beyond) for position, part in enumerate(content)]:
        case []:
            return ""
        case [ContentPart(type="text", text=str() as text)]:
            return text
        case parts:
            return parts


def _part(part: InputContent, path: str, beyond: list[Unsupported]) -> ContentPart:
    match part:
        case InputText(text=text) | PlainText(text=text) | AssistantText(text=text) | AssistantRefusal(refusal=text):
            return ContentPart(type="text", text=text)
        case InputImage(image_url=str() as url, detail=detail):
            return ContentPart(type="image_url", image_url=ImageUrl(url=url, detail=detail))
        case InputFile(file_data=str() as data, filename=filename):
            return ContentPart(type="file", file=FilePart(file_data=data, filename=filename))
    member = "image_url" if isinstance(part, InputImage) else "file_data"
    beyond.append(
        Unsupported(
            f"{path}.{member} is required: no files are kept here. Send what the file holds as a data: URL.",
            param=f"{path}.{member}",
        )
    )
    return ContentPart(type="file", file=FilePart())


def _texts_of(content: str | list[InputContent], path: str) -> list[tuple[str, bool]]:
    """Returns the texts of an assistant's message, and whether each is a refusal."""
    if isinstance(content, str):
        return [(content, False)]
    texts = []
    for position, part in enumerate(content):
        match part:
            case InputText(text=text) | PlainText(text=text) | AssistantText(text=text):
                texts.append((text, False))
            case AssistantRefusal(refusal=text):
                texts.append((text, True))
            case _:
                kind = type(part).__struct_config__.tag
                raise InvalidRequest(
                    f"{path}[{position}] is of the type {format_value(kind)}, but an assistant's message has text "
                    "only. Send parts of the type 'output_text'.",
                    param=f"{path}[{position}]",
                )
    return texts


def _tools(request: InputTokensRequest, beyond: list[Unsupported]) -> tuple[list[dict[str, Any]], Any]:
    """Returns the tools and the choice among them as chat completions have them; see `_convert_items`."""
    if not isinstance(request.tools, list | None):
        raise InvalidRequest(f"tools must be a list; got {format_value(request.tools)}.", param="tools")
    tools: dict[tuple[str, str], dict[str, Any]] = {}
    for position, tool in enumerate(request.tools or ()):
        match tool:
            case {"type": "function" | "custom" as kind, "name": str() as name, **rest}:
                read = ("description", "parameters", "strict") if kind == "function" else ("description", "format")
                described = {"name": name, **{field: rest[field] for field in read if rest.get(field) is not None}}
                if kind == "custom" and "format" in described:
                    described["format"] = _custom_format(described["format"])
                tools[kind, name] = {"type": kind, kind: described}
            case {"type": "function" | "custom"}:
                raise InvalidRequest(f"tools[{position}].name is required.", param=f"tools[{position}].name")
            case {"type": str()}:
                pass  # it runs at a provider: it is left out and named
            case {"type": kind} if kind is not None:
                raise InvalidRequest(
                    f"tools[{position}].type must be a string; got {format_value(kind)}.",
                    param=f"tools[{position}].type",
                )
            case other if not isinstance(other, dict):
                raise InvalidRequest(
                    f"tools[{position}] must be an object; got {format_value(other)}.", param=f"tools[{position}]"
                )
            case _:
                raise InvalidRequest(f"tools[{position}].type is required.", param=f"tools[{position}].type")
    match request.tool_choice:
        case {"type": "function" | "custom" as kind, "name": str() as name}:
            _require(tools, (kind, name))
            return [*tools.values()], {"type": kind, kind: {"name": name}}
        case {"type": "allowed_tools", "mode": "auto" | "required", "tools": [*allowed]} if hosted := next(
            filter(_is_hosted, allowed), None
        ):
            beyond.append(_unknown_choice(hosted, "tool_choice.tools"))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*allowed]}:
            keys = [_key_of(entry) for entry in allowed]
            for key in keys:
                _require(tools, key)
            return [tools[key] for key in dict.fromkeys(keys)], mode
        case None | "none" | "auto" | "required" as choice:
            return [*tools.values()], choice if tools or choice == "required" else None
        case other if _is_hosted(other):
            beyond.append(_unknown_choice(other, "tool_choice"))
        case other:
            raise InvalidRequest(
                "tool_choice must be none, auto, required, or an object that names functions or custom tools of tools; "
                f"got {format_value(other)}.",
                param="tool_choice",
            )
    return [*tools.values()], None


def _is_hosted(choice: object) -> bool:
    """Returns whether a choice names a tool that runs at a provider."""
    match choice:
        case {"type": str() as kind}:
            return kind not in ("function", "custom", "allowed_tools")
    return False


def _unknown_choice(choice: Mapping[str, Any], param: str) -> Unsupported:
    return Unsupported(
        f"{param} names {format_value(choice['type'])}, a tool that runs at a server of the Responses API only. Name "
        "functions or custom tools of tools.",
        param=param,
    )


def _key_of(entry: Any) -> tuple[str, str]:  # noqa: ANN401 - as it was sent
    match entry:
        case {"type": "function" | "custom" as kind, "name": str() as name}:
            return kind, name
    raise InvalidRequest(
        "tool_choice.tools must hold functions or custom tools by their type and name.", param="tool_choice.tools"
    )


def _require(tools: Mapping[tuple[str, str], Any], key: tuple[str, str]) -> None:
    if key not in tools:
        raise InvalidRequest(
            f"tool_choice names {format_value(key[1])}, which is none of tools. Declare it there.", param="tool_choice"
        )


def _custom_format(form: Any) -> Any:  # noqa: ANN401 - as it was sent
    """Returns the form of a custom tool's input as chat completions have it."""
    match form:
        case {"type": "grammar", "syntax": syntax, "definition": definition}:
            return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return form
