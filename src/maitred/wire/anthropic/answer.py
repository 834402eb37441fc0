"""Reads a Messages answer, as a stream or whole, and finds out whether it is complete. Pure: events in, deltas out.

The deltas are those of OpenAI's chat completions. A stream is complete once ``message_stop`` has come in its place:
after ``message_start``, blocks that were opened, filled and closed one by one in the order of their numbers, and a
``message_delta`` with the reason for the end and the usage. Whatever else happens is a failure; only events, blocks and
deltas of kinds that nobody knows yet are passed over, as Anthropic asks of clients, and so is what the model thinks.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import UnsetType

from maitred.core.request import MOST_TOKENS, Usage
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
from maitred.wire.sse import Event

Finish = Literal["stop", "length", "tool_calls", "content_filter"]

_FINISHES: Mapping[str, Finish] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
"""Every reason that means an end. Others, such as ``pause_turn``, mean that there is more to come."""
STATUS_OF: Mapping[str, int] = {
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
"""The HTTP status that an error has when it comes before the stream."""


class AnswerBroken(Exception):
    """The answer is not whole, and nothing that comes can make it so."""


class AnswerFailed(Exception):
    """The server reported an error in the stream.

    Args:
        kind: Its type, such as ``overloaded_error``.
        message: Its words.

    Attributes:
        status: The HTTP status that it would have had before the stream.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.status = STATUS_OF.get(kind, 500)


class AnswerDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was added to the answer, in the words of a chat completion."""

    text: str = ""
    tool_calls: list[dict[str, Any]] | None = None
    """As in a chunk's delta: the first piece of a call has its id and name, the others have pieces of its arguments."""
    finish: Finish | None = None
    """On the last delta of a complete answer, and on no other."""


_event = msgspec.json.Decoder(StreamEvent)
_answer = msgspec.json.Decoder(MessagesAnswer)
_KINDS = frozenset(
    str(kind.__struct_config__.tag)
    for kind in (
        *(MessageStart, ContentBlockStart, ContentBlockDelta, ContentBlockStop, MessageDelta, MessageStop, PingEvent),
        MessagesErrorBody,
    )
)


class MessagesStreamParser:
    """One stream.

    Attributes:
        begun: Whether any part of the answer has come.
        complete: Whether all of it has.
        usage: As counted so far; None before the server has said anything of it.
    """

    def __init__(self) -> None:
        self.begun = False
        self.complete = False
        self.usage: Usage | None = None
        self._counts: MessageUsage | None = None
        self._started = False
        self._block: ContentBlock | None = None
        self._next = 0
        self._calls = 0
        self._arguments: list[str] = []
        self._finish: Finish | None = None

    def feed(self, event: Event) -> list[AnswerDelta]:
        """What this event adds.

        Raises:
            AnswerBroken: It cannot stand where it does, or cannot be read.
            AnswerFailed: It is an error.
        """
        decoded = _decoded(event)
        if decoded is None or isinstance(decoded, PingEvent):
            return []
        if isinstance(decoded, MessagesErrorBody):
            raise AnswerFailed(decoded.error.type, decoded.error.message)
        if self.complete:
            raise AnswerBroken(f"it went on with {event.type} after message_stop")
        if self._started is isinstance(decoded, MessageStart):
            raise AnswerBroken("message_start came twice" if self._started else "it does not begin with message_start")
        added = list(self._take(decoded))
        self.begun = self.begun or bool(added)
        return added

    def ended(self) -> None:
        """The stream has no more bytes.

        Raises:
            AnswerBroken: The answer is not complete.
        """
        if not self.complete:
            raise AnswerBroken("it ended before message_stop" if self._started else "it was empty")

    def _take(self, event: StreamEvent) -> Iterator[AnswerDelta]:
        match event:
            case MessageStart(message=message):
                self._started = True
                self._counts = message.usage
                self.usage = _usage_of(self._counts)
            case ContentBlockStart(index=index, content_block=block):
                self._check(index == self._next and self._block is None and self._finish is None, "content_block_start")
                yield from self._open(block)
            case ContentBlockDelta(index=index, delta=delta):
                self._check(index == self._next and self._block is not None, "content_block_delta")
                yield from self._fill(delta)
            case ContentBlockStop(index=index):
                self._check(index == self._next and self._block is not None, "content_block_stop")
                yield from self._close()
            case MessageDelta(delta=delta, usage=usage):
                self._check(self._block is None, "message_delta")
                self._counts = usage if self._counts is None else _merged(usage, self._counts)
                self.usage = _usage_of(self._counts)
                if delta.stop_reason is not None:
                    self._finish = _finish_of(delta.stop_reason, self._calls)
            case MessageStop():
                self._check(self._block is None and self._finish is not None, "message_stop")
                self.complete = True
                yield AnswerDelta(finish=self._finish)

    def _check(self, in_order: bool, kind: str) -> None:
        if not in_order:
            raise AnswerBroken(f"{kind} came out of its order")

    def _open(self, block: ContentBlock) -> Iterator[AnswerDelta]:
        self._block = block
        if block.type == "tool_use":
            self._arguments.clear()
            yield AnswerDelta(tool_calls=[{**_call(block, self._calls), "index": self._calls}])
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
                    yield self._argument(piece)
            case BlockDelta(type="text_delta" | "input_json_delta") if kind in ("text", "tool_use"):
                raise AnswerBroken(f"a block of {kind} got a {delta.type}")

    def _close(self) -> Iterator[AnswerDelta]:
        if self._block is not None and self._block.type == "tool_use":
            yield from self._close_call(self._block)
            self._calls += 1
        self._block = None
        self._next += 1

    def _close_call(self, block: ContentBlock) -> Iterator[AnswerDelta]:
        """Checks that the arguments are whole. Where no piece of them came, they are those the block began with."""
        if not self._arguments:
            yield self._argument(_json(block.input))
            return
        try:
            arguments = msgspec.json.decode("".join(self._arguments))
        except (msgspec.DecodeError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise AnswerBroken("the arguments of a tool are no JSON object")

    def _argument(self, piece: str) -> AnswerDelta:
        return AnswerDelta(tool_calls=[{"index": self._calls, "function": {"arguments": piece}}])


class WholeAnswer(msgspec.Struct, frozen=True):
    """An answer that came at once, in the words of a chat completion."""

    text: str
    tool_calls: list[dict[str, Any]]
    finish: Finish
    usage: Usage


def read_whole(body: bytes) -> WholeAnswer:
    """Reads the body of an answer that is no stream.

    Raises:
        AnswerBroken: It is no complete answer.
    """
    try:
        answer = _answer.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise AnswerBroken(f"the body is no message ({error})") from None
    if answer.stop_reason is None:
        raise AnswerBroken("it does not say why it ended")
    used = [block for block in answer.content if block.type == "tool_use"]
    calls = [_call(block, number) for number, block in enumerate(used)]
    for call, block in zip(calls, used, strict=True):
        call["function"]["arguments"] = _json(block.input)
    return WholeAnswer(
        "".join(block.text for block in answer.content if block.type == "text" and isinstance(block.text, str)),
        calls,
        _finish_of(answer.stop_reason, len(calls)),
        _usage_of(answer.usage),
    )


def _decoded(event: Event) -> StreamEvent | None:
    """The event; None for one of a kind that nobody knows yet."""
    try:
        decoded: StreamEvent = _event.decode(event.data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        kind = _kind_in(event.data)
    else:
        return decoded
    if kind is None:
        raise AnswerBroken("it sent an event that is no JSON object with a type")
    if kind in _KINDS:
        raise AnswerBroken(f"it sent a {kind} that lacks what it must have")
    return None


def _kind_in(data: str) -> str | None:
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    kind = fields.get("type") if isinstance(fields, dict) else None
    return kind if isinstance(kind, str) else None


def _finish_of(reason: str, calls: int) -> Finish:
    finish = _FINISHES.get(reason)
    if finish is None:
        raise AnswerBroken(f"it stopped for the reason {reason[:40]!r}, which is no end")
    if finish == "tool_calls" and not calls:
        raise AnswerBroken("it stopped for a tool and called none")
    return finish


def _call(block: ContentBlock, number: int) -> dict[str, Any]:
    if not isinstance(block.id, str) or not isinstance(block.name, str):
        raise AnswerBroken(f"the call of a tool ({number}) has no id or no name")
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": ""}}


def _json(arguments: object) -> str:
    match arguments:
        case dict():
            return msgspec.json.encode(arguments).decode("utf-8")
        case None | UnsetType():
            return "{}"
        case _:
            raise AnswerBroken("the arguments of a tool are no JSON object")


def _merged(usage: MessageUsage, before: MessageUsage) -> MessageUsage:
    """Counts are running totals; what is not said again stays as it was."""
    said = {name: count for name, count in msgspec.structs.asdict(usage).items() if isinstance(count, int)}
    return msgspec.structs.replace(before, **said)


def _usage_of(counts: MessageUsage) -> Usage:
    """A usage as OpenAI counts it, where the prompt is all of the prompt."""
    rest, written, read = (
        count if isinstance(count, int) else 0
        for count in (counts.input_tokens, counts.cache_creation_input_tokens, counts.cache_read_input_tokens)
    )
    if not isinstance(counts.input_tokens, int):
        raise AnswerBroken("it does not say how many tokens the prompt has")
    if not all(0 <= count <= MOST_TOKENS for count in (rest, written, read, counts.output_tokens)):
        raise AnswerBroken("its usage cannot be")
    return Usage(rest + written + read, counts.output_tokens, read)
