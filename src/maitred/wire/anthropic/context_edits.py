"""Edits of the context in Messages requests: old thoughts and old results of tools are removed from the prompt.

They are the strategies of Anthropic's context editing that clear something
(https://platform.claude.com/docs/en/build-with-claude/context-editing), for models that have no such strategies of
their own. An edit depends on the conversation alone, so the prompts of later turns begin alike up to the latest results
that were kept.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from maitred.core.errors import InvalidRequest, Unsupported
from maitred.wire.anthropic.requests import (
    Block,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    RedactedThinkingBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from maitred.wire.openai.faults import format_value

R = TypeVar("R", MessagesRequest, CountTokensRequest)
CLEARED = "[Old tool result content cleared]"
"""Text that the model reads in the place of a result that was cleared."""
_Count = Annotated[int, Meta(ge=0)]


class ToolUseCount(msgspec.Struct, frozen=True, tag_field="type", tag="tool_uses"):
    """Number of tool calls with their results."""

    value: _Count


class InputTokenCount(msgspec.Struct, frozen=True, tag_field="type", tag="input_tokens"):
    """Number of tokens of the prompt."""

    value: _Count


class ThinkingTurnCount(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_turns"):
    """Number of turns of the assistant that have thoughts."""

    value: Annotated[int, Meta(ge=1)]


class ClearToolUses(msgspec.Struct, frozen=True, tag_field="type", tag="clear_tool_uses_20250919"):
    """Clears the results of the oldest tool calls once the prompt is long."""

    trigger: InputTokenCount | ToolUseCount = InputTokenCount(100_000)
    keep: ToolUseCount = ToolUseCount(3)
    """Latest calls whose results stay."""
    clear_at_least: InputTokenCount | None = None
    """The edit is not made if it removes less."""
    exclude_tools: list[str] | None = None
    """Names of tools whose results stay."""
    clear_tool_inputs: bool | list[str] | None = None
    """Whether the inputs of the calls are cleared, too, or of which tools."""

    def apply(self, request: R) -> tuple[R, int]:
        """Returns the request without the results, and their number."""
        calls = [
            block
            for message in request.messages
            for block in message.blocks()
            if isinstance(block, ToolUseBlock) and block.name not in (self.exclude_tools or ())
        ]
        old = {call.id: call.name for call in calls[: max(0, len(calls) - self.keep.value)]}
        cleared: set[str] = set()

        def clear(block: Block) -> Block:
            match block:
                case ToolResultBlock(tool_use_id=call_id) if call_id in old and block.content != CLEARED:
                    cleared.add(call_id)
                    return replace(block, content=CLEARED)
                case ToolUseBlock(id=call_id, name=name) if call_id in old and self._clears_input(name):
                    return replace(block, input={})
            return block

        return _map_blocks(request, clear), len(cleared)

    def _clears_input(self, name: str) -> bool:
        clears = self.clear_tool_inputs
        return name in clears if isinstance(clears, list) else bool(clears)

    def is_due(self, request: CountTokensRequest, input_tokens: int) -> bool:
        """Returns whether the conversation is as long as the trigger says."""
        if isinstance(self.trigger, InputTokenCount):
            return input_tokens > self.trigger.value
        calls = sum(isinstance(block, ToolUseBlock) for message in request.messages for block in message.blocks())
        return calls > self.trigger.value


class ClearThinking(msgspec.Struct, frozen=True, tag_field="type", tag="clear_thinking_20251015"):
    """Clears the thoughts of all but the latest turns."""

    keep: ThinkingTurnCount | Literal["all"] | None = None
    """Latest turns whose thoughts stay; by default one."""

    def apply(self, request: R) -> tuple[R, int]:
        """Returns the request without the thoughts, and the number of turns that had them."""
        if self.keep == "all":
            return request, 0
        kept = self.keep.value if isinstance(self.keep, ThinkingTurnCount) else 1
        turns = [
            position for position, message in enumerate(request.messages) if any(map(_is_thought, message.blocks()))
        ]
        old = set(turns[: max(0, len(turns) - kept)])
        messages = [
            replace(message, content=[block for block in message.blocks() if not _is_thought(block)])
            if position in old
            else message
            for position, message in enumerate(request.messages)
        ]
        return replace(request, messages=[message for message in messages if message.content]), len(old)

    def is_due(self, request: CountTokensRequest, input_tokens: int) -> bool:
        """Returns True: thoughts are cleared from every conversation."""
        return True


ContextEdit = ClearToolUses | ClearThinking
_CLEARED_NAMES = {ClearToolUses: "cleared_tool_uses", ClearThinking: "cleared_thinking_turns"}
_TYPES = tuple(str(kind.__struct_config__.tag) for kind in _CLEARED_NAMES)


def edits_of(management: Any) -> list[ContextEdit]:  # noqa: ANN401 - whatever was sent
    """Returns the edits in `context_management`.

    Raises:
        Unsupported: An edit is one that only a server of this API makes.
        InvalidRequest: It is malformed; `param` says where.
    """
    if management is None:
        return []
    edits = management.get("edits") if isinstance(management, dict) else management
    if edits is None:
        return []
    if not isinstance(edits, list):
        raise InvalidRequest(
            "context_management must be an object with a list of edits.", param="context_management.edits"
        )
    return [_decode(f"context_management.edits[{position}]", edit) for position, edit in enumerate(edits)]


def _decode(path: str, edit: object) -> ContextEdit:
    members = edit if isinstance(edit, dict) else {}
    if members.get("type") not in _TYPES:
        raise Unsupported(
            f"{path}.type must be {' or '.join(_TYPES)} for the model that is asked; got "
            f"{format_value(members.get('type'))}. Remove the edit.",
            param=path,
        )
    try:
        decoded: ContextEdit = msgspec.convert(
            {name: value for name, value in members.items() if value is not None}, ContextEdit
        )
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{path} is malformed: {error}.", param=path) from None
    return decoded


async def apply_edits(
    request: R, count: Callable[[CountTokensRequest], Awaitable[int]]
) -> tuple[R, list[dict[str, Any]]]:
    """Applies the edits that a request asks for.

    Args:
        request: The request.
        count: Counts the tokens of the prompt of a request; awaited.

    Returns:
        The request, and a description of each edit that has removed something.

    Raises:
        InvalidRequest: See `edits_of`.
    """
    edits = edits_of(request.context_management)
    applied: list[dict[str, Any]] = []
    tokens = None
    for edit in edits:
        shorter, cleared = edit.apply(request)
        if not cleared:
            continue
        if tokens is None:
            tokens = await count(request)
        if not edit.is_due(request, tokens):
            continue
        left = await count(shorter)
        if isinstance(edit, ClearToolUses) and edit.clear_at_least and tokens - left < edit.clear_at_least.value:
            continue
        name = _CLEARED_NAMES[type(edit)]
        applied.append({"type": edit.__struct_config__.tag, name: cleared, "cleared_input_tokens": tokens - left})
        request, tokens = shorter, left
    return request, applied


def _map_blocks(request: R, change: Callable[[Block], Block]) -> R:
    messages: Sequence[InputMessage] = request.messages
    return replace(
        request,
        messages=[
            message
            if isinstance(message.content, str)
            else replace(message, content=[change(block) for block in message.content])
            for message in messages
        ],
    )


def _is_thought(block: Block) -> bool:
    return isinstance(block, ThinkingBlock | RedactedThinkingBlock)
