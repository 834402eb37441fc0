"""Messages requests, field by field, for clients that speak Anthropic and servers that do.

Names and meanings are defined by Anthropic (https://platform.claude.com/docs/en/api/messages). A field that was not
sent is omitted, so the written request has no more fields than the original request. Some fields exist only to be
rejected, as in `maitred.wire.openai.requests`.
"""

from typing import Any

import msgspec

from maitred.wire.openai.requests import RequestBody


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
    content: str | list[TextBlock | ImageBlock] | None = None
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
    """Block of an earlier answer that only the server that wrote it can read, such as a result of its own tools.

    `wrap_server_blocks` makes it of a block of the body, and `unwrap_server_blocks` the other way round.
    """

    block: dict[str, Any]


Block = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock | ServerBlock
KNOWN_BLOCKS = frozenset({"text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"})
"""Types of the other blocks."""


def wrap_server_blocks(body: Any) -> Any:  # noqa: ANN401 - whatever JSON can be
    """Returns a decoded body in which the foreign blocks of earlier answers have the form of `ServerBlock`."""
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not any(map(_has_server_blocks, messages)):
        return body
    wrapped = [
        {**message, "content": list(map(_wrap, message["content"]))} if _has_server_blocks(message) else message
        for message in messages
    ]
    return {**body, "messages": wrapped}


def unwrap_server_blocks(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a request with its foreign blocks as their server wrote them."""
    for message in body["messages"]:
        if isinstance(message["content"], list):
            message["content"] = [
                block["block"] if block["type"] == "server_block" else block for block in message["content"]
            ]
    return body


def _has_server_blocks(message: object) -> bool:
    match message:
        case {"role": "assistant", "content": [*blocks]}:
            return any(map(_is_server_block, blocks))
    return False


def _is_server_block(block: object) -> bool:
    return isinstance(block, dict) and isinstance(kind := block.get("type"), str) and kind not in KNOWN_BLOCKS


def _wrap(block: Any) -> Any:  # noqa: ANN401 - whatever JSON can be
    return {"type": "server_block", "block": block} if _is_server_block(block) else block


class InputMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn, or a part of a turn; adjacent messages of one role form one turn."""

    role: str
    content: str | list[Block]

    def blocks(self) -> list[Block]:
        """Returns the content as a list of blocks, however it was written."""
        return [TextBlock(text=self.content)] if isinstance(self.content, str) else self.content


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

    @property
    def output_format(self) -> Any:  # noqa: ANN401 - whatever was sent
        """Requested form of the answer, or None if there is none."""
        return self.output_config.get("format") if isinstance(self.output_config, dict) else None


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
