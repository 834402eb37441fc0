"""The response of OpenAI's Responses API and the events of its stream, field by field.

Every field of a response is always sent, as null if it has no value: the compliance suite of Open Responses
(https://www.openresponses.org) refuses a response without one of them. Items are structs in `output`; a member that a
server has beyond them is laid over the written item.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from maitred.core.request import Usage
from maitred.wire.responses.compaction import CompactedWindow
from maitred.wire.sse import encode_event

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text of the answer."""

    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[dict[str, Any]] = []


class OutputRefusal(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    """Text with which the model refuses to answer."""

    refusal: str


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of the reasoning."""

    text: str


ContentPart = OutputText | OutputRefusal | ReasoningText


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """Message of the model."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText | OutputRefusal]


class OutputFunctionCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """Call of a function, whose arguments are a JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    extra_content: Any = UNSET
    """Members that the server sent with the call, such as Google's signatures."""


class OutputCustomCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """Call of a tool whose input is a text."""

    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus


class OutputReasoning(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of the model before its answer."""

    id: str
    status: ItemStatus
    summary: list[dict[str, Any]] = []
    content: list[ReasoningText]
    encrypted_content: str | UnsetType | None = UNSET
    """The reasoning for the next request of a client that keeps the conversation itself, if it asked for it."""


class OutputCompaction(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="compaction"):
    """Item that stands for the conversation before it; see `maitred.wire.responses.compaction`."""

    id: str
    encrypted_content: str
    status: Literal["incomplete"] | UnsetType = UNSET
    """Whether its summary was cut; not OpenAI's field."""

    @classmethod
    def of(cls, item_id: str, window: CompactedWindow, encrypted_content: str) -> "OutputCompaction":
        """Builds the item of a sealed window."""
        return cls(id=item_id, encrypted_content=encrypted_content, status="incomplete" if window.is_cut else UNSET)


OutputItem = OutputMessage | OutputFunctionCall | OutputCustomCall | OutputReasoning | OutputCompaction


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Breakdown of the tokens of the input."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Breakdown of the tokens of the output."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a response, as billed."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    estimated: bool | UnsetType = UNSET
    """True if the counts are estimates, because the server reported none; not OpenAI's field."""

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        """Builds the usage of a response."""
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=usage.cached_tokens, cache_write_tokens=usage.cache_write_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
            total_tokens=usage.total_tokens,
            estimated=usage.estimated or UNSET,
        )


class ResponseFault(msgspec.Struct, frozen=True, kw_only=True):
    """Error that ended a response."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens", "content_filter"]
    stop_reason: Literal["deadline"] | UnsetType = UNSET
    """Reason that OpenAI has no word for; not OpenAI's field."""


class ConversationName(msgspec.Struct, frozen=True, kw_only=True):
    """The conversation that a response belongs to."""

    id: str


class ResponseResource(msgspec.Struct, frozen=True, kw_only=True):
    """A response, complete or in progress."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    conversation: ConversationName | None = None
    status: Status
    background: bool = False
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: list[dict[str, Any]] = []
    """Items of the output; see `OutputItem`."""
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    store: bool = True
    temperature: float = 1.0
    text: dict[str, Any]
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str] = {}
    service_tier: str = "default"
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompactedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `POST /v1/responses/compact`."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    """Messages of the user, then a compaction item that stands for all other items."""
    usage: ResponseUsage


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `DELETE /v1/responses/{id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ConversationResource(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: Mapping[str, str]


class ConversationDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `DELETE /v1/conversations/{id}`."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """Page of the items of a response's input, or of a conversation."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `POST /v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
    estimated: bool | UnsetType = UNSET
    """Whether the number is an estimate. The field is not OpenAI's; omitted if the tokens were counted."""


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Event of the stream of a response; each type has those of the fields that OpenAI defines for it."""

    type: str
    sequence_number: int | UnsetType = UNSET
    response: ResponseResource | UnsetType = UNSET
    """The response so far, in the events that begin and end it."""
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: dict[str, Any] | UnsetType = UNSET
    part: ContentPart | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    refusal: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[dict[str, Any]] | UnsetType = UNSET
    annotation: dict[str, Any] | UnsetType = UNSET
    annotation_index: int | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
    maitred: dict[str, Any] | UnsetType = UNSET
    """Additional fields of this gateway, omitted if there are none."""


_encoder = msgspec.json.Encoder()


def encode(body: msgspec.Struct | Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> bytes:
    """Encodes a body or a list of items as JSON in UTF-8."""
    return _encoder.encode(body)


decode_item = msgspec.json.Decoder(dict[str, Any]).decode
"""Decodes a stored item."""


_LOST = "The server that ran this response has ended before the answer was complete. Send the request again."


def end_without_answer(resource: bytes, *, cancelled: bool) -> bytes:
    """Returns a stored response whose server has ended, as cancelled or as failed."""
    if cancelled:
        return encode({**decode_item(resource), "status": "cancelled"})
    fault = ResponseFault(code="server_error", message=_LOST)
    return encode({**decode_item(resource), "status": "failed", "error": fault})


def encode_response_event(event: ResponseEvent) -> bytes:
    """Encodes an event of a stream with its event name."""
    return encode_event(_encoder.encode(event), event.type.encode("ascii"))
