"""Responses of a Messages server, field by field: whole answers, stream events and errors.

The structs serve both directions. When they are read they tolerate additions (blocks, deltas and stop reasons of
unknown
types), but not the lack of a field that an answer needs.

Events: https://platform.claude.com/docs/en/build-with-claude/streaming; errors: .../docs/en/api/errors.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from maitred.core.request import Usage
from maitred.wire.openai.responses import Marks


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens, as billed. Those of the prompt are counted apart: read from the cache, written to it, and the rest."""

    output_tokens: int
    """Output tokens so far; final in ``message_delta``."""
    input_tokens: int | UnsetType | None = UNSET
    cache_creation_input_tokens: int | UnsetType | None = UNSET
    cache_read_input_tokens: int | UnsetType | None = UNSET

    @classmethod
    def of(cls, usage: Usage) -> "MessageUsage":
        """Builds Anthropic's usage counts. Writes to this gateway's caches cost nothing, so their count is 0."""
        return cls(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
        )


class ContentBlock(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A block of an answer; in ``content_block_start`` still empty."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: Any = UNSET


class MessagesAnswer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A whole answer; in ``message_start`` one without content."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


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
    """An addition to a block: ``text_delta``, ``thinking_delta``, or ``input_json_delta`` (of a tool's arguments)."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET


class ContentBlockDelta(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="type", tag="content_block_delta"
):
    """An addition to the open content block."""

    index: int
    delta: BlockDelta
    maitred: Marks | UnsetType = UNSET
    """Marks of this gateway, not Anthropic's; left out if there are none."""


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
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="type", tag="message_stop"):
    """The last event of every complete answer."""


class PingEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="type", tag="ping"):
    """A sign of life of the server; may come at any time."""


class ErrorCode(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The exact code of an error, since `type` is coarse."""

    error_code: str | UnsetType | None = UNSET


class MessagesError(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Description of an error: `type` for a program, `message` for a person."""

    type: str
    message: str
    details: ErrorCode | UnsetType | None = UNSET


class MessagesErrorBody(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="type", tag="error"):
    """Any error, whole or as the last event of a stream."""

    error: MessagesError
    request_id: str | UnsetType | None = UNSET


class TokenCount(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int


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
Body = MessagesAnswer | MessagesErrorBody | TokenCount

_encoder = msgspec.json.Encoder()


def encode(body: Body) -> bytes:
    """Encodes a body as JSON in UTF-8."""
    return _encoder.encode(body)


def encode_stream_event(event: StreamEvent) -> bytes:
    """Encodes an event of a stream, under its name."""
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
