"""Rules for the input of a model: conversations, prompts, token ids, and arguments of the chat template.

Of the arguments there may be few, with small names and values.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.wire.openai.faults import format_value
from maitred.wire.openai.requests import ContentPart, Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_ROLES = frozenset(ROLES) - {"tool"}
"""Roles whose messages need no more than a text."""
MAX_TOKEN_ID = 2**31 - 1
MAX_TOKENS = 1_048_576
"""Most token ids in one list.

No context window is as long, and checking every number of a longer list would delay other requests.
"""


def check_messages(messages: Sequence[Message]) -> None:
    """Raises InvalidRequest for the first message that a text model cannot read."""
    if not messages:
        raise InvalidRequest("messages must hold at least one message.", param="messages")
    for position, message in enumerate(messages):
        if message.content.__class__ is not str or message.role not in _TEXT_ROLES:
            _check_message(f"messages[{position}]", message)


def check_prompt(prompt: str | Sequence[str | int | Sequence[int]], path: str = "prompt") -> None:
    """Raises InvalidRequest unless the prompt is one text, several, one list of token ids, or several."""
    if isinstance(prompt, str):
        return
    if not prompt:
        raise InvalidRequest(f"{path} must not be an empty list.", param=path)
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise InvalidRequest(f"{path} must hold only texts, only token ids, or only lists of token ids.", param=path)
    if kinds == {int}:
        check_token_ids(path, cast("Sequence[int]", prompt))
    elif kinds == {list}:
        for position, tokens in enumerate(prompt):
            if isinstance(tokens, list):
                if not tokens:
                    raise InvalidRequest(
                        f"{path}[{position}] must hold at least one token id.", param=f"{path}[{position}]"
                    )
                check_token_ids(f"{path}[{position}]", tokens)


def check_token_ids(path: str, tokens: Sequence[int]) -> None:
    """Raises InvalidRequest for the first number that is no token id, or for more ids than any model reads."""
    if len(tokens) > MAX_TOKENS:
        raise InvalidRequest(f"{path} must hold at most {MAX_TOKENS:,} token ids; got {len(tokens):,}.", param=path)
    if tokens and (min(tokens) < 0 or max(tokens) > MAX_TOKEN_ID):
        wrong = next(token for token in tokens if not 0 <= token <= MAX_TOKEN_ID)
        raise InvalidRequest(f"{path} must hold token ids; got {format_value(wrong)}.", param=path)


def _check_message(path: str, message: Message) -> None:
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{path}.role must be one of {', '.join(ROLES)}; got {format_value(message.role)}.", param=f"{path}.role"
        )
    match message.content:
        case None if message.role == "assistant" and (message.tool_calls or message.function_call or message.refusal):
            pass
        case None:
            raise InvalidRequest(
                f"{path}.content must be a string or a list of text parts; got null.", param=f"{path}.content"
            )
        case []:
            raise InvalidRequest(f"{path}.content must hold at least one part.", param=f"{path}.content")
        case [*parts]:
            for position, part in enumerate(parts):
                _check_part(f"{path}.content[{position}]", part)
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(
            f"{path}.tool_call_id is required for the role tool: it names the call that this answers.",
            param=f"{path}.tool_call_id",
        )


def _check_part(path: str, part: ContentPart) -> None:
    if part.type != "text":
        raise InvalidRequest(
            f"{path} has the type {format_value(part.type)}, but this model reads text only. Send parts of the "
            "type 'text'.",
            param=path,
        )
    if part.text is None:
        raise InvalidRequest(f"{path}.text is required.", param=f"{path}.text")


MAX_ARGUMENTS = 32
MAX_NAME_CHARACTERS = 64
MAX_BYTES = 16 * 1024
"""Most bytes of all arguments as JSON.

A template may write them into the prompt, and runs before the prompt is counted.
"""
_RESERVED_NAMES = frozenset({"messages", "tools", "add_generation_prompt"})
_FIELD = "chat_template_kwargs"


def check_template_arguments(arguments: Mapping[str, Any] | None, enable_thinking: bool | None = None) -> None:
    """Raises InvalidRequest for the first rule that the arguments break."""
    if not arguments:
        return
    if len(arguments) > MAX_ARGUMENTS:
        raise InvalidRequest(f"{_FIELD} must have at most {MAX_ARGUMENTS} entries; got {len(arguments)}.", param=_FIELD)
    for name in arguments:
        if len(name) > MAX_NAME_CHARACTERS or not name.isidentifier():
            raise InvalidRequest(
                f"The names in {_FIELD} must be names of variables, of at most {MAX_NAME_CHARACTERS} characters; got "
                f"{format_value(name)}.",
                param=_FIELD,
            )
        if name in _RESERVED_NAMES:
            raise InvalidRequest(
                f"{_FIELD}.{name} is set by the request itself. Remove it, and send {name} as a field.", param=_FIELD
            )
    if (size := len(msgspec.json.encode(arguments))) > MAX_BYTES:
        raise InvalidRequest(f"{_FIELD} must have at most {MAX_BYTES:,} bytes; got {size:,}.", param=_FIELD)
    effective = arguments.get("enable_thinking", enable_thinking)
    if enable_thinking is not None and effective is not enable_thinking:
        raise InvalidRequest(
            f"enable_thinking and {_FIELD}.enable_thinking differ. Send only one.", param="enable_thinking"
        )
