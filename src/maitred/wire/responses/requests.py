"""Requests of OpenAI's Responses API, field by field, with the items of their input.

Names and meanings are defined by OpenAI (https://platform.openai.com/docs/api-reference/responses) and by Open
Responses (https://www.openresponses.org). The history of a conversation is a list of items: messages, calls of tools,
their results, and reasoning. Clients leave the type of a message out; `tag_items` adds it before the types are checked.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from maitred.core.errors import Unsupported
from maitred.wire.openai.requests import CacheFields, RequestBody, StreamOptions


class InputText(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="input_text"):
    """Text that the model reads."""

    text: str


class PlainText(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="text"):
    """Text without a direction; some clients send it in place of `InputText`."""

    text: str


class AssistantText(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="output_text"):
    """Text of an earlier answer."""

    text: str
    annotations: Any = None
    logprobs: Any = None


class AssistantRefusal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="refusal"):
    """Refusal of an earlier answer."""

    refusal: str


class InputImage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="input_image"):
    """An image in a message, as an address or as a ``data:`` URL."""

    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None


class InputFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="input_file"):
    """A file in a message, as a ``data:`` URL."""

    filename: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    detail: str | None = None


InputContent = InputText | PlainText | AssistantText | AssistantRefusal | InputImage | InputFile


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="message"):
    """One message of a conversation."""

    role: str
    content: str | list[InputContent]
    id: str | None = None
    status: str | None = None
    phase: Any = None


class FunctionCallItem(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="function_call"
):
    """Call of a function in an earlier answer."""

    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: str | None = None
    extra_content: Any = None
    """Members that the server sent with the call, such as Google's signatures."""


class FunctionResultItem(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="function_call_output"
):
    """Result of a call of a function."""

    call_id: str
    output: str | list[InputContent]
    id: str | None = None
    status: str | None = None


class CustomCallItem(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="custom_tool_call"
):
    """Call of a tool whose input is a text, in an earlier answer."""

    call_id: str
    name: str
    input: str
    id: str | None = None
    status: str | None = None
    namespace: str | None = None


class CustomResultItem(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="custom_tool_call_output"
):
    """Result of a call of a tool whose input is a text."""

    call_id: str
    output: str | list[InputContent]
    id: str | None = None
    status: str | None = None


class ReasoningPart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of the reasoning."""

    text: str


class ReasoningSummary(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    """Summary of the reasoning."""

    text: str


class ReasoningInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="reasoning"):
    """Reasoning before an earlier answer."""

    id: str | None = None
    summary: list[ReasoningSummary] | None = None
    content: list[ReasoningPart] | None = None
    encrypted_content: str | None = None
    status: str | None = None


_ENCODED = "maitred1."


def encode_thoughts(blocks: Sequence[dict[str, Any]]) -> str:
    """Returns blocks of thoughts, in the form of Anthropic's API, as the text of ``encrypted_content``.

    A client that keeps the conversation itself sends the text back. It is encoded and not encrypted: the client has the
    thoughts anyway, and signatures are checked by the server that made them.
    """
    return _ENCODED + base64.urlsafe_b64encode(msgspec.json.encode(blocks)).decode("ascii")


def decode_thoughts(text: str | None) -> list[dict[str, Any]]:
    """Returns the blocks in a text of `encode_thoughts`; empty for a text of another server."""
    if text is None or not text.startswith(_ENCODED):
        return []
    try:
        blocks = msgspec.json.decode(base64.urlsafe_b64decode(text[len(_ENCODED) :]), type=list[dict[str, Any]])
    except (binascii.Error, ValueError, msgspec.MsgspecError, RecursionError):
        return []
    return [block for block in blocks if isinstance(block.get("thinking", ""), str)]


class ItemReference(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="item_reference"
):
    """Reference to an item of a stored response."""

    id: str


class CompactionItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="compaction"):
    """Item that stands for the conversation before it; see `maitred.wire.responses.compaction`."""

    encrypted_content: str
    id: str | None = None


class ServerItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="server_item"):
    """Record of a tool that ran at a provider; `tag_items` makes it of an item, or of parts, of any other type."""

    item: dict[str, Any]


InputItem = (
    MessageItem
    | FunctionCallItem
    | FunctionResultItem
    | CustomCallItem
    | CustomResultItem
    | ReasoningInput
    | ItemReference
    | CompactionItem
    | ServerItem
)
ITEM_TYPES = (
    *("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    *("reasoning", "item_reference", "compaction"),
)
"""Types of the other items."""
SERVER_CALLS = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call"),
    *("local_shell_call", "shell_call", "apply_patch_call", "tool_search_call", "mcp_list_tools", "mcp_call"),
    "mcp_approval_request",
)
"""Types of records that another model can do without: they say that a tool was called, and not what it gave."""


_PART_TYPES = frozenset(
    {
        *("input_text", "text", "output_text", "refusal", "input_image", "input_file"),
        *("reasoning_text", "summary_text"),
    }
)


def tag_items(items: Any) -> Any:  # noqa: ANN401 - whatever JSON can be
    """Returns the items of an input with their types, where clients may leave them out, and foreign ones wrapped."""
    return list(map(_tag, items)) if isinstance(items, list) else items


def _tag(item: Any) -> Any:  # noqa: ANN401 - whatever JSON can be
    match item:
        case {"type": None} | {"role": _} | {"id": _} if "type" not in item or item["type"] is None:
            rest = {name: value for name, value in item.items() if name != "type"}
            return _tag({"type": "message" if "role" in rest else "item_reference", **rest})
        case {"type": str() as kind} if kind not in ITEM_TYPES or find_foreign_part(item) is not None:
            return {"type": "server_item", "item": item}
        case _:
            return item


def find_foreign_part(item: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the path and the type of the first part of an item that has another type than those above; None: none."""
    for member in ("content", "output", "summary"):
        parts = item.get(member)
        for position, part in enumerate(parts if isinstance(parts, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in _PART_TYPES:
                return f"{member}[{position}]", kind
    return None


def untag_item(item: dict[str, Any]) -> dict[str, Any]:
    """Returns an item as its client wrote it: a foreign one without the wrapper."""
    if item["type"] == "server_item":
        inner: dict[str, Any] = item["item"]
        return inner
    return item


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings for the text of the answer."""

    format: Any = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings for the reasoning of the model."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ContextManagement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Entry that says when the conversation is compacted before the answer."""

    type: str
    compact_threshold: int | None = None
    """Number of tokens beyond which it is; None: three quarters of the model's window."""


class ConversationReference(msgspec.Struct, frozen=True, kw_only=True):
    """Reference to a stored conversation."""

    id: str


class InputTokensRequest(RequestBody, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/responses/input_tokens`: what the model reads in a request for an answer."""

    model: str
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationReference | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: str | None = None

    @cached_property
    def sent(self) -> Mapping[str, Any]:
        """The request as it was written; the decoder sets it."""
        return {}

    @cached_property
    def beyond_chat(self) -> Unsupported | None:
        """The error for the first field that no chat completion has; the decoder sets it. None: there is none."""
        return None

    def items(self) -> list[InputItem]:
        """Returns the items of the request's own input, however it was written."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input or []

    def written_items(self) -> list[dict[str, Any]]:
        """Returns the same items as their client wrote them, each with its type."""
        written = self.sent.get("input")
        if isinstance(written, str):
            return [{"type": "message", "role": "user", "content": written}]
        return list(map(untag_item, tag_items(written or [])))

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation that the request goes on with."""
        conversation = self.conversation
        return conversation.id if isinstance(conversation, ConversationReference) else conversation


R = TypeVar("R", bound=InputTokensRequest)


def with_input(request: R, items: Sequence[Mapping[str, Any]]) -> R:
    """Returns a request with other items in its input.

    Args:
        request: The request.
        items: The items as they are written.
    """
    changed = msgspec.structs.replace(request, input=msgspec.convert(tag_items([*items]), list[InputItem]))
    vars(changed).update(vars(request), sent={**request.sent, "input": items})
    return changed


class ResponsesRequest(InputTokensRequest, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/responses`."""

    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    priority: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache: CacheFields | None = None
    context_management: list[ContextManagement] | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer is sent as a stream."""
        return self.stream is True

    @property
    def includes(self) -> frozenset[str]:
        """Additional parts of the answer that the client asks for."""
        return frozenset(self.include or ())


class CompactRequest(InputTokensRequest, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/responses/compact`: the conversation, and who asks."""

    service_tier: str | None = None
    priority: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache: CacheFields | None = None


class CreateConversation(RequestBody, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/conversations`."""

    items: list[InputItem] | None = None
    metadata: dict[str, str] | None = None


class UpdateConversation(RequestBody, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/conversations/{id}`."""

    metadata: dict[str, str] | None


class AddItems(RequestBody, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/conversations/{id}/items`."""

    items: list[InputItem]
    include: list[str] | None = None


class ItemsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query that selects a page of items."""

    limit: Annotated[int, Meta(ge=1, le=100, description="Most items of the page.")] = 20
    order: Annotated[str, Meta(description="`asc`, or `desc` for the newest first.")] = "desc"
    after: Annotated[str | None, Meta(description="Id of the last item of the page before.")] = None
    include: Annotated[list[str], Meta(description="Additional parts; an item has all that it was made with.")] = []


class RetrieveQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query that says how a stored response is read."""

    stream: Annotated[bool, Meta(description="Whether it is sent as the events of its stream.")] = False
    starting_after: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Number of the event after which the stream begins; with `stream` only."),
    ] = None
    include: Annotated[list[str], Meta(description="Additional parts of its items.")] = []
