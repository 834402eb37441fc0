"""Responses of a Messages server, field by field: whole answers, stream events and errors.

They are what this gateway writes; what other servers write is parsed in `maitred.wire.anthropic.answer`.

Events: https://platform.claude.com/docs/en/build-with-claude/streaming; errors: .../docs/en/api/errors.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from maitred.core.request import Usage
from maitred.wire.openai.responses import Marks

_Count = Annotated[Any, Meta(extra_json_schema={"type": "integer"})]


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Billed token counts; the cached, cache-written and other prompt tokens are separate.

    Servers report counts in many forms, so any value is decoded; see `maitred.wire.reported_usage`.
    """

    output_tokens: _Count = UNSET
    """Number of output tokens so far; the count in ``message_delta`` is final."""
    input_tokens: _Count = UNSET
    cache_creation_input_tokens: _Count = UNSET
    cache_read_input_tokens: _Count = UNSET
    cache_creation: Annotated[Any, Meta(extra_json_schema={"type": "object"})] = UNSET
    """Cache-written tokens by the lifetime of the cache."""

    @classmethod
    def of(cls, usage: Usage) -> "MessageUsage":
        """Builds usage counts in Anthropic's form.

        Writes to the caches of this gateway cost nothing, so only those at other servers are counted.
        """
        return cls(
            input_tokens=usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
            cache_creation_input_tokens=usage.cache_write_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
        )


class ContentBlock(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Block of an answer, which is still empty in ``content_block_start``."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    data: str | UnsetType = UNSET
    """Encrypted thinking, of blocks of the type ``redacted_thinking``."""
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: Any = UNSET


class MessagesAnswer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Whole answer, which has no content yet in ``message_start``."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage | None = MessageUsage()


class MessageStart(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="type", tag="message_start"):
    """The first event of a stream."""

    message: MessagesAnswer


class ContentBlockStart(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="type", tag="content_block_start"
):
    """The start of a content block."""

    index: int
    content_block: ContentBlock


class BlockDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An addition to a block.

    It is a ``text_delta``, ``thinking_delta``, ``signature_delta`` (of thinking) or ``input_json_delta`` (of a tool's
    arguments).
    """

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET


class ContentBlockDelta(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="type", tag="content_block_delta"
):
    """An addition to the open content block."""

    index: int
    delta: BlockDelta
    maitred: Marks | UnsetType = UNSET
    """Additional fields of this gateway, which are not Anthropic's; omitted if there are none."""


class ContentBlockStop(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="type", tag="content_block_stop"):
    """The end of a content block."""

    index: int


class StopDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The reason for the end of the answer."""

    stop_reason: str | None = None
    stop_sequence: str | None = None


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="type", tag="message_delta"):
    """The stop reason and the usage, after the last content block."""

    delta: StopDelta
    usage: MessageUsage | None = MessageUsage()


class MessageStop(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="type", tag="message_stop"):
    """The last event of every complete answer."""


class PingEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="type", tag="ping"):
    """Event that shows that the server is alive; it may come at any time."""


class ErrorCode(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Exact code of an error, because `type` is coarse."""

    error_code: str | UnsetType | None = UNSET


class MessagesError(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Description of an error: `type` for a program, `message` for a person."""

    type: str
    message: str
    details: ErrorCode | UnsetType | None = UNSET


class MessagesErrorBody(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="type", tag="error"):
    """Body of any error, alone or as the last event of a stream."""

    error: MessagesError
    request_id: str | UnsetType | None = UNSET


class OriginalTokens(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Number of tokens before the edits of the context."""

    original_input_tokens: int


class TokenCount(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int
    context_management: OriginalTokens | UnsetType = UNSET
    estimated: bool | UnsetType = UNSET
    """Whether the number is an estimate. The field is not Anthropic's; omitted if the tokens were counted."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="type", tag="model"):
    """One model that is served, in the words of this API."""

    id: str
    display_name: str
    created_at: str
    """Time in the form of RFC 3339."""
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None = None


class ModelPage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A page of the models that are served."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


StreamEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | PingEvent
    | MessagesErrorBody
)
Body = MessagesAnswer | MessagesErrorBody | TokenCount | ModelInfo | ModelPage

_encoder = msgspec.json.Encoder()


def encode(body: Body | Mapping[str, Any]) -> bytes:
    """Encodes a body, or its fields, as JSON in UTF-8."""
    return _encoder.encode(body)


def encode_stream_event(event: StreamEvent | Mapping[str, Any]) -> bytes:
    """Encodes an event of a stream, or its fields, with its event name."""
    if isinstance(event, Mapping):
        return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode("ascii"), _encoder.encode(event))
    return b"event: %b\ndata: %b\n\n" % (_EVENT_NAMES[type(event)], _encoder.encode(event))


_EVENT_NAMES = {
    kind: str(kind.__struct_config__.tag).encode("ascii")
    for kind in (
        MessageStart,
        ContentBlockStart,
        ContentBlockDelta,
        ContentBlockStop,
        MessageDelta,
        MessageStop,
        PingEvent,
        MessagesErrorBody,
    )
}
