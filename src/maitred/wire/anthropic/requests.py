"""Messages requests, field by field, for clients that speak Anthropic and servers that do.

Names and meanings are defined by Anthropic (https://platform.claude.com/docs/en/api/messages). A field that was not
sent is omitted, so the written request has no more fields than the original request. Some fields exist only to be
rejected, as in `maitred.wire.openai.requests`.
"""

import operator
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec

from maitred.core.errors import Unsupported
from maitred.wire.openai.requests import CacheFields, RequestBody


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="text"):
    """Block with a piece of text."""

    text: str
    cache_control: Any = None
    citations: Any = None


class Base64Source(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="base64"):
    """Image whose data is in the request."""

    media_type: str
    data: str


class UrlSource(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="url"):
    """Image that the server downloads."""

    url: str


class ImageBlock(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="image"):
    """An image in a message."""

    source: Base64Source | UrlSource
    cache_control: Any = None


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="tool_use"):
    """Block with a tool call of the model."""

    id: str
    name: str
    input: dict[str, Any]
    extra_content: Any = None
    """Members that the server of another API sent with the call, such as Google's signatures."""
    cache_control: Any = None


class ToolResultBlock(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="tool_result"
):
    """Block with the result of a tool call, in a user message."""

    tool_use_id: str
    content: "str | list[TextBlock | ImageBlock | ServerBlock] | None" = None
    is_error: bool | None = None
    cache_control: Any = None


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """The model's thinking before an earlier answer."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """The model's thinking before an earlier answer, encrypted."""

    data: str


class ServerBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="server_block"):
    """Block that only a server of this API can read, such as a document, or a result of one of the server's own tools.

    `wrap_server_blocks` makes it of a block of the body, and `unwrap_server_blocks` the other way round.
    """

    block: dict[str, Any]


Block = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock | ServerBlock
KNOWN_BLOCKS = frozenset({"text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"})
"""Types of the other blocks."""


def is_document(block: ServerBlock) -> bool:
    """Returns whether a block is a document that chat completions can say: a text, or a PDF within the request."""
    match block.block:
        case {"type": "document", "source": {"type": "text", "data": str()}}:
            return True
        case {"type": "document", "source": {"type": "base64", "media_type": str(), "data": str()}}:
            return True
    return False


def wrap_server_blocks(body: Any) -> Any:  # noqa: ANN401 - whatever JSON can be
    """Returns a decoded body in which blocks of other types than `KNOWN_BLOCKS` have the form of `ServerBlock`."""
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list):
        return body
    wrapped = list(map(_wrap_content, messages))
    return {**body, "messages": wrapped} if any(map(operator.is_not, wrapped, messages)) else body


def unwrap_server_blocks(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a request with its foreign blocks as their server wrote them."""
    return {**body, "messages": list(map(_unwrap_content, body["messages"]))}


def _unwrap_content(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message or the result of a tool with the blocks of its content as they were."""
    content = message.get("content")
    return {**message, "content": list(map(_unwrap, content))} if isinstance(content, list) else message


def _unwrap(block: dict[str, Any]) -> dict[str, Any]:
    if block["type"] == "server_block":
        unwrapped: dict[str, Any] = block["block"]
        return unwrapped
    return _unwrap_content(block) if block["type"] == "tool_result" else block


def _wrap_content(message: Any) -> Any:  # noqa: ANN401 - whatever JSON can be
    """Returns a message or the result of a tool with the blocks of its content wrapped; itself if there is nothing."""
    match message:
        case {"content": [*blocks]}:
            wrapped = list(map(_wrap, blocks))
            if any(map(operator.is_not, wrapped, blocks)):
                return {**message, "content": wrapped}
    return message


def _wrap(block: Any) -> Any:  # noqa: ANN401 - whatever JSON can be
    match block:
        case {"type": "tool_result"}:
            return _wrap_content(block)
        case {"type": "image", "source": {"type": str() as kind}} if kind not in ("base64", "url"):
            return {"type": "server_block", "block": block}
        case {"type": str() as kind} if kind not in KNOWN_BLOCKS:
            return {"type": "server_block", "block": block}
    return block


class InputMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn, or a part of a turn; adjacent messages of one role form one turn."""

    role: str
    content: str | list[Block]

    def blocks(self) -> list[Block]:
        """Returns the content as a list of blocks, however it was written."""
        return [TextBlock(text=self.content)] if isinstance(self.content, str) else self.content


CUSTOM_TOOL_TYPES = (None, "custom")
"""Types of the tools that run at the client; those of any other type run at the server."""


class ToolDefinition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool that the model may call."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    """JSON Schema of an object; only tools that run at the provider have none."""
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Choice of the tools to call: ``auto``, ``any``, ``tool`` (by its name) or ``none``."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class RequestMetadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Metadata of a Messages request."""

    user_id: str | None = None
    """Opaque id that distinguishes the end users of a client."""


class CountTokensRequest(RequestBody, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/messages/count_tokens`: a conversation as in a request for an answer."""

    model: str
    messages: list[InputMessage]
    system: str | list[TextBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Any = None
    cache_control: Any = None
    output_config: Any = None
    context_management: Any = None
    mcp_servers: Any = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    @cached_property
    def sent(self) -> Mapping[str, Any]:
        """The body as the client wrote it; the decoder sets it."""
        return {}

    @cached_property
    def beyond_chat(self) -> Unsupported | None:
        """The error for models that are asked by another API; None: a chat completion says the same.

        The decoder sets it.
        """
        return None

    @property
    def output_format(self) -> Any:  # noqa: ANN401 - whatever was sent
        """Requested form of the answer, or None if there is none."""
        return self.output_config.get("format") if isinstance(self.output_config, dict) else None

    @property
    def continues_answer(self) -> bool:
        """Whether the last message is the beginning of the answer.

        An answer that ended with pause_turn is sent back as it is, and its server goes on with it.
        """
        last = self.messages[-1]
        return last.role == "assistant" and not isinstance(last.blocks()[-1], ServerBlock)


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: RequestMetadata | None = None
    service_tier: str | None = None
    cache: CacheFields | None = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: str | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer is sent as a stream."""
        return self.stream is True


_encoder = msgspec.json.Encoder()


def encode_request(request: MessagesRequest) -> bytes:
    """Encodes the body of a request as JSON in UTF-8."""
    return _encoder.encode(request)
