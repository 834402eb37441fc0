"""Parser of Messages answers, streamed or whole; it checks that they are complete.

The parser performs no I/O: it turns events into deltas.

The deltas have the form of OpenAI's chat completions. A stream is complete when ``message_stop`` has come in the right
order: after ``message_start``, content blocks that were opened, filled and closed one by one in the order of their
numbers, and a ``message_delta`` with the stop reason and the usage. Any other order is a failure. Events, blocks and
deltas of unknown types are skipped, as Anthropic asks of clients, and so is the model's thinking.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from maitred.core.request import Usage
from maitred.wire.anthropic.responses import (
    BlockDelta,
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    MessageDelta,
    MessagesAnswer,
    MessagesErrorBody,
    MessageStart,
    MessageStop,
    MessageUsage,
    PingEvent,
    StreamEvent,
)
from maitred.wire.reported_usage import parse_usage
from maitred.wire.sse import SSEEvent

Finish = Literal["stop", "length", "tool_calls", "content_filter"]

_FINISH_REASONS: Mapping[str, Finish] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
"""Stop reasons that end an answer; others, such as ``pause_turn``, mean that more follows."""
ERROR_STATUSES: Mapping[str, int] = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""Map from each error type to the HTTP status of the error before a stream."""


class AnswerBroken(Exception):
    """Error for an incomplete answer that no further event can complete."""


class AnswerFailed(Exception):
    """Error that the server reported in the stream.

    Args:
        kind: The type of the error, such as ``overloaded_error``.
        message: The message of the server.

    Attributes:
        status: HTTP status that the error has if it comes before the stream.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.status = ERROR_STATUSES.get(kind, 500)


class AnswerDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Addition to the answer, in the form of a chat completion."""

    text: str = ""
    tool_calls: list[dict[str, Any]] | None = None
    """Pieces of tool calls as in the delta of a chunk.

    The first piece has the id and the name, and the others have pieces of the arguments.
    """
    finish: Finish | None = None
    """Finish reason, which only the last delta of a complete answer has."""


_event_decoder = msgspec.json.Decoder(StreamEvent)
_answer_decoder = msgspec.json.Decoder(MessagesAnswer)
_EVENT_TYPES = frozenset(
    str(kind.__struct_config__.tag)
    for kind in (
        *(MessageStart, ContentBlockStart, ContentBlockDelta, ContentBlockStop, MessageDelta, MessageStop, PingEvent),
        MessagesErrorBody,
    )
)


class MessagesStreamParser:
    """Parser of one stream of Messages events.

    Attributes:
        has_output: Whether the parser has received any part of the answer.
        is_complete: Whether the parser has received the whole answer.
        usage: Usage so far, or None before the server has reported any.
    """

    def __init__(self) -> None:
        self.has_output = False
        self.is_complete = False
        self.usage: Usage | None = None
        self._counts = MessageUsage()
        self._started = False
        self._block: ContentBlock | None = None
        self._next_index = 0
        self._tool_call_count = 0
        self._arguments: list[str] = []
        self._finish: Finish | None = None

    def feed(self, event: SSEEvent) -> list[AnswerDelta]:
        """Parses an event and returns its additions to the answer.

        Raises:
            AnswerBroken: The event is out of order, or cannot be read.
            AnswerFailed: The event is an error.
        """
        decoded = _decode_event(event)
        if decoded is None or isinstance(decoded, PingEvent):
            return []
        if isinstance(decoded, MessagesErrorBody):
            raise AnswerFailed(decoded.error.type, decoded.error.message)
        if self.is_complete:
            raise AnswerBroken(f"it went on with {event.type} after message_stop")
        if self._started is isinstance(decoded, MessageStart):
            raise AnswerBroken("message_start came twice" if self._started else "it does not begin with message_start")
        added = list(self._apply(decoded))
        self.has_output = self.has_output or bool(added)
        return added

    def on_end(self) -> None:
        """Handles the end of the stream.

        Raises:
            AnswerBroken: The answer is not complete.
        """
        if not self.is_complete:
            raise AnswerBroken("it ended before message_stop" if self._started else "it was empty")

    def _apply(self, event: StreamEvent) -> Iterator[AnswerDelta]:
        match event:
            case MessageStart(message=message):
                self._started = True
                self._counts = message.usage or MessageUsage()
                self.usage = _to_usage(self._counts)
            case ContentBlockStart(index=index, content_block=block):
                self._check(
                    index == self._next_index and self._block is None and self._finish is None, "content_block_start"
                )
                yield from self._open(block)
            case ContentBlockDelta(index=index, delta=delta):
                self._check(index == self._next_index and self._block is not None, "content_block_delta")
                yield from self._fill(delta)
            case ContentBlockStop(index=index):
                self._check(index == self._next_index and self._block is not None, "content_block_stop")
                yield from self._close()
            case MessageDelta(delta=delta, usage=usage):
                self._check(self._block is None, "message_delta")
                self._counts = _merge_usage(usage or MessageUsage(), self._counts)
                self.usage = _to_usage(self._counts)
                if delta.stop_reason is not None:
                    self._finish = _stop_reason(delta.stop_reason, self._tool_call_count)
            case MessageStop():
                self._check(self._block is None and self._finish is not None, "message_stop")
                self.is_complete = True
                yield AnswerDelta(finish=self._finish)

    def _check(self, in_order: bool, kind: str) -> None:
        if not in_order:
            raise AnswerBroken(f"{kind} came out of its order")

    def _open(self, block: ContentBlock) -> Iterator[AnswerDelta]:
        self._block = block
        if block.type == "tool_use":
            self._arguments.clear()
            yield AnswerDelta(tool_calls=[{**_tool_call(block, self._tool_call_count), "index": self._tool_call_count}])
        elif block.type == "text" and block.text:
            yield AnswerDelta(text=block.text)

    def _fill(self, delta: BlockDelta) -> Iterator[AnswerDelta]:
        kind = self._block.type if self._block else ""
        match delta:
            case BlockDelta(type="text_delta", text=str() as text) if kind == "text":
                if text:
                    yield AnswerDelta(text=text)
            case BlockDelta(type="input_json_delta", partial_json=str() as piece) if kind == "tool_use":
                if piece:
                    self._arguments.append(piece)
                    yield self._argument_delta(piece)
            case BlockDelta(type="text_delta" | "input_json_delta") if kind in ("text", "tool_use"):
                raise AnswerBroken(f"a block of {kind} got a {delta.type}")

    def _close(self) -> Iterator[AnswerDelta]:
        if self._block is not None and self._block.type == "tool_use":
            yield from self._close_call(self._block)
            self._tool_call_count += 1
        self._block = None
        self._next_index += 1

    def _close_call(self, block: ContentBlock) -> Iterator[AnswerDelta]:
        """Checks that the arguments of a tool call are complete.

        If no piece of the arguments has come, the arguments are those in the start of the block.
        """
        if not self._arguments:
            yield self._argument_delta(_encode_arguments(block.input))
            return
        try:
            arguments = msgspec.json.decode("".join(self._arguments))
        except (msgspec.DecodeError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise AnswerBroken("the arguments of a tool are no JSON object")

    def _argument_delta(self, piece: str) -> AnswerDelta:
        return AnswerDelta(tool_calls=[{"index": self._tool_call_count, "function": {"arguments": piece}}])


class WholeAnswer(msgspec.Struct, frozen=True):
    """Answer that came in one body, in the form of a chat completion."""

    text: str
    tool_calls: list[dict[str, Any]]
    finish: Finish
    usage: Usage | None
    """None: the server counted nothing."""


def parse_answer(body: bytes) -> WholeAnswer:
    """Parses the body of an answer that is not a stream.

    Raises:
        AnswerBroken: The body is not a complete answer.
    """
    try:
        answer = _answer_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise AnswerBroken(f"the body is no message ({error})") from None
    if answer.stop_reason is None:
        raise AnswerBroken("it does not say why it ended")
    tool_blocks = [block for block in answer.content if block.type == "tool_use"]
    calls = [_tool_call(block, number) for number, block in enumerate(tool_blocks)]
    for call, block in zip(calls, tool_blocks, strict=True):
        call["function"]["arguments"] = _encode_arguments(block.input)
    return WholeAnswer(
        "".join(block.text for block in answer.content if block.type == "text" and isinstance(block.text, str)),
        calls,
        _stop_reason(answer.stop_reason, len(calls)),
        _to_usage(answer.usage or MessageUsage()),
    )


def _decode_event(event: SSEEvent) -> StreamEvent | None:
    """Decodes an event; returns None for an event of an unknown type."""
    try:
        decoded: StreamEvent = _event_decoder.decode(event.data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        kind = _event_type(event.data)
    else:
        return decoded
    if kind is None:
        raise AnswerBroken("it sent an event that is no JSON object with a type")
    if kind in _EVENT_TYPES:
        raise AnswerBroken(f"it sent a {kind} that lacks what it must have")
    return None


def _event_type(data: str) -> str | None:
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    kind = fields.get("type") if isinstance(fields, dict) else None
    return kind if isinstance(kind, str) else None


def _stop_reason(reason: str, calls: int) -> Finish:
    finish = _FINISH_REASONS.get(reason)
    if finish is None:
        raise AnswerBroken(f"it stopped for the reason {reason[:40]!r}, which is no end")
    if finish == "tool_calls" and not calls:
        raise AnswerBroken("it stopped for a tool and called none")
    return finish


def _tool_call(block: ContentBlock, number: int) -> dict[str, Any]:
    if not isinstance(block.id, str) or not isinstance(block.name, str):
        raise AnswerBroken(f"the call of a tool ({number}) has no id or no name")
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": ""}}


def _encode_arguments(arguments: object) -> str:
    match arguments:
        case dict():
            return msgspec.json.encode(arguments).decode("utf-8")
        case None | UnsetType():
            return "{}"
        case _:
            raise AnswerBroken("the arguments of a tool are no JSON object")


def _merge_usage(usage: MessageUsage, previous: MessageUsage) -> MessageUsage:
    """Merges usage counts, which are running totals; an omitted count keeps its previous value."""
    counts = {
        name: count for name, count in msgspec.structs.asdict(usage).items() if count is not None and count is not UNSET
    }
    return msgspec.structs.replace(previous, **counts)


def _to_usage(counts: MessageUsage) -> Usage | None:
    """Converts usage counts to the form of OpenAI, whose prompt tokens include the cached and the written ones."""
    return parse_usage(msgspec.structs.asdict(counts))
