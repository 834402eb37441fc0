"""Parser of streamed Messages answers; it checks that they are complete.

The parser performs no I/O: it turns events into deltas.

The deltas have the form of OpenAI's chat completions. A stream is complete when a ``message_delta`` has given the
reason for its end and ``message_stop`` has come, or its body has ended as it said it would. Content that belongs to no
block, or comes after the reason, is a failure. Everything else is read leniently, because many servers speak this API,
each in its own way: events, blocks and deltas of unknown types are skipped, as Anthropic asks of clients; counts,
endings of blocks and numbers may be missing; tool calls may be cut, or have arguments that are no JSON.

What chat completions have no place for (citations, tools that run at the server and their results, any other block) is
in `TextDelta.block` as it comes. The last delta then also has all blocks of the answer, as the server sent them, in
``content_blocks``, and the citations of web pages as OpenAI's ``annotations``. Further members of the message, such as
``container``, are in `TextDelta.metadata`.

The model's thinking becomes `REASONING_FIELDS` as it comes. A signed block of it also becomes an entry of
``thinking_blocks`` when it has ended: without the signature, Anthropic refuses the next turn of a conversation with
tools. LiteLLM has the same member in its chat completions.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from maitred.core.ids import new_object_id
from maitred.core.inference import ChunkMetadata, TextDelta
from maitred.core.request import FinishReason, Usage
from maitred.wire.answer_event import (
    AnswerBroken,
    AnswerFailed,
    TextAssembler,
    decode_event,
    parse_finish_reason,
    replace_surrogates,
)
from maitred.wire.openai.responses import REASONING_FIELDS
from maitred.wire.reported_usage import is_empty, read_usage
from maitred.wire.sse import SSEEvent

_KNOWN_BLOCKS = frozenset({"text", "tool_use", "thinking", "redacted_thinking"})
"""Blocks that chat completions have a place for."""
_OUTPUT_COUNT = frozenset({"input_tokens", "output_tokens"})
_READ_OF_TEXT = frozenset({"type", "text"})
_READ_OF_CALL = frozenset({"type", "id", "name", "input"})
_READ_OF_MESSAGE = frozenset(
    {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage", "delta", "error"}
)
_END_MARKERS = ("", "[DONE]")
"""Data of events that have no content."""


class OpenBlock:
    """Content block that has begun and not ended.

    Args:
        start: The block in its first event.
        number: Number of the tool call; of any other block, the number of texts and calls before it.

    Attributes:
        pieces: The text, the arguments or the thought so far.
        is_counted: Whether the text has been counted among the texts.
        signature: Signature of the thought.
        members: Members that came after the start, such as citations.
    """

    def __init__(self, start: Mapping[str, Any], number: int) -> None:
        self.start = start
        self.type = start.get("type")
        self.number = number
        self.pieces: list[str] = []
        self.is_counted = False
        self.signature = ""
        self.members: dict[str, Any] = {}

    @property
    def is_foreign(self) -> bool:
        """Whether chat completions have no place for such a block."""
        return self.type not in _KNOWN_BLOCKS

    def add(self, delta: Mapping[str, Any]) -> None:
        """Adds a delta that chat completions have no place for."""
        match delta:
            case {"type": "citations_delta", "citation": citation}:
                self.members["citations"] = [*self.citations, citation]
            case {"type": "input_json_delta", "partial_json": str() as piece}:
                self.pieces.append(piece)
            case _:
                for name, value in delta.items():
                    earlier = self.members.get(name, self.start.get(name))
                    if name != "type":
                        is_piece = isinstance(value, str) and isinstance(earlier, str)
                        self.members[name] = earlier + value if is_piece else value

    @property
    def citations(self) -> list[Any]:
        """Citations of the text so far."""
        citations = self.members.get("citations", self.start.get("citations"))
        return citations if isinstance(citations, list) else []

    def whole(self) -> dict[str, Any]:
        """Returns the whole block, as a server that does not stream would send it."""
        block = {**self.start, **self.members}
        written = "".join(self.pieces)
        match self.type:
            case "text":
                block["text"] = written
            case "thinking":
                block |= {"thinking": written, "signature": self.signature}
            case _ if written:
                try:
                    block["input"] = msgspec.json.decode(written)
                except (msgspec.MsgspecError, UnicodeError, RecursionError):
                    block["input"] = written
        return block


class MessagesStreamParser:
    """Parser of one stream of Messages events.

    Attributes:
        is_complete: Whether the parser has received the whole answer.
        usage: Usage of the whole answer; None: the server has not reported it yet.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self.usage: Usage | None = None
        self._counts: dict[str, Any] = {}
        self._blocks: dict[int, OpenBlock] = {}
        self._latest_index = -1
        self._has_content = False
        self._call_count = 0
        self._thought_count = 0
        self._text_count = 0
        self._finish: FinishReason | None = None
        self._order: list[OpenBlock] = []
        """All blocks, in their order."""
        self._empty_call: OpenBlock | None = None
        """Latest block, if it is a call that has ended without arguments."""
        self._has_foreign = False
        """Whether something has come that chat completions have no place for."""
        self._members: dict[str, Any] = {}
        """Members of the message that are not read here."""
        self._untyped: dict[str, Any] = {}
        """Event without a type that has a message: an error, if no answer comes."""
        self._characters = TextAssembler()
        """Joins characters whose parts come in two events, by block and member."""

    @property
    def has_ended(self) -> bool:
        """Whether the reason for the end has come."""
        return self._finish is not None

    def is_whole(self, fields: Mapping[str, Any]) -> bool:
        """Returns whether an object is a whole answer."""
        return fields.get("type") == "message"

    def feed(self, event: SSEEvent) -> list[TextDelta]:
        """Parses an event and returns its additions to the answer, the last of them with the finish reason.

        Raises:
            AnswerBroken: The event is out of order, or cannot be read.
            AnswerFailed: The event is an error.
        """
        fields = self._decode(event)
        match fields.get("type"):
            case "message_start":
                return list(self._start(fields.get("message")))
            case "content_block_start" | "content_block_delta" | "content_block_stop" as kind:
                added = list(self._apply(kind, fields))
                if self._finish is None:
                    return added
                if any(delta.text or delta.extra for delta in added):
                    raise AnswerBroken("it went on after its end")
            case "message_delta":
                return list(self._end(fields))
            case "message" if isinstance(fields.get("content"), list | str) and not self._has_content:
                return self.feed_whole(fields)  # a whole answer in place of a stream
            case "message_stop":
                if self._finish is None:
                    raise AnswerBroken("it does not say why it ended")
                self.is_complete = True
        return []

    def feed_whole(self, message: Mapping[str, Any]) -> list[TextDelta]:
        """Parses an answer that has come as one object, though a stream was asked for; raises as `feed` does."""
        _raise_error(message)
        if message.get("type") != "message" or not isinstance(message.get("content"), list | str):
            raise AnswerBroken("the body is no message")
        deltas = list(self._add_blocks(message))
        deltas += self._end({"delta": message, "usage": message.get("usage")})
        if self._finish is None:
            raise AnswerBroken("it does not say why it ended")
        self.is_complete = True
        return deltas

    def on_end(self) -> None:
        """Handles the end of the body, which has ended as it said it would; an answer with a reason is complete.

        Raises:
            AnswerBroken: The answer is not complete.
            AnswerFailed: There is no answer but an error.
        """
        if self._untyped and not self._has_content and self._finish is None:
            raise AnswerFailed("", _text(self._untyped["message"]), self._untyped)
        self.is_complete = self._finish is not None
        if not self.is_complete:
            raise AnswerBroken("it ended before message_stop" if self._counts or self._has_content else "it was empty")

    def _start(self, message: object) -> Iterator[TextDelta]:
        if self._has_content:
            raise AnswerBroken("message_start came twice")
        if isinstance(message, dict):
            # The output tokens are final in message_delta only.
            self._merge_counts(message.get("usage"), without="output_tokens")
            self._keep_members(message)
            yield from self._add_blocks(message)

    def _add_blocks(self, message: Mapping[str, Any]) -> Iterator[TextDelta]:
        """Adds the blocks that a message has at once."""
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for index, block in enumerate(blocks if isinstance(blocks, list) else ()):
            yield from self._open(index, {"content_block": block})
            yield from self._close(self._blocks.pop(index))

    def _apply(self, kind: str, fields: Mapping[str, Any]) -> Iterator[TextDelta]:
        index = fields.get("index")
        if kind == "content_block_start":
            yield from self._open(index if isinstance(index, int) else self._latest_index + 1, fields)
            return
        place = index if isinstance(index, int) else self._latest_index
        block = self._blocks.get(place)
        if kind == "content_block_stop":
            if self._characters.held and any(held[-1] == "text" for held in self._characters.take(place)):
                yield TextDelta(0, "\ufffd")  # the rest of its last character has not come
            if block is not None:
                del self._blocks[place]
                yield from self._close(block)
            return
        delta = fields.get("delta")
        if not isinstance(delta, dict):
            raise AnswerBroken("it sent a content_block_delta without a delta")
        if block is not None:
            yield from self._fill(block, delta)
        elif any(delta.get(name) for name in ("text", "thinking", "partial_json")):
            raise AnswerBroken("a delta came for no open block")

    def _open(self, index: int, fields: Mapping[str, Any]) -> Iterator[TextDelta]:
        start = fields.get("content_block")
        if not isinstance(start, dict):
            raise AnswerBroken("it sent a content_block_start without a block")
        if "type" not in start and isinstance(start.get("text"), str):
            start = {"type": "text", **start}
        self._has_content = True
        earlier = self._blocks.get(index)
        if earlier is not None:
            if earlier.start == start and not earlier.pieces:
                return  # the event came twice
            yield from self._close(earlier)
        yield from self._fill_empty_call()
        is_call = start.get("type") == "tool_use"
        is_text, before = start.get("type") == "text", self._order[-1].type if self._order else ""
        follows_text = is_text and before == "text"
        if is_text and (self._call_count or self._text_count):
            self._has_foreign = True  # a chat has one text, which stands before its calls
        number = self._call_count if is_call else self._call_count + self._text_count
        block = self._blocks[index] = OpenBlock(start, number)
        self._latest_index = index
        self._order.append(block)
        if block.is_foreign:
            self._has_foreign = True
            yield TextDelta(0, "", block={"type": "content_block_start", "content_block": dict(start)})
        elif is_text and (follows_text or _has_beyond(start, _READ_OF_TEXT)):
            # Texts that follow one another are apart where they have citations of their own.
            self._has_foreign = self._has_foreign or _has_beyond(start, _READ_OF_TEXT)
            yield TextDelta(0, "", block={"type": "content_block_start", "content_block": {**start, "text": ""}})
        match start:
            case {"type": "tool_use"}:
                self._call_count += 1
                yield TextDelta(0, "", extra={"tool_calls": [_tool_call(start, block.number)]})
            case {"type": "thinking"}:
                yield from self._add_thought(block, start.get("thinking"))
                block.signature = _text(start.get("signature"))
            case {"type": "text", "text": str() as text} if text:
                yield self._text(block, text)

    def _text(self, block: OpenBlock, text: str) -> TextDelta:
        block.pieces.append(text)
        if not block.is_counted and text.strip():
            self._text_count += 1
            block.is_counted = True
        return TextDelta(0, text)

    def _fill(self, block: OpenBlock, delta: Mapping[str, Any]) -> Iterator[TextDelta]:
        match delta:
            case {"type": "text_delta", "text": str() as text} if block.type == "text":
                if text:
                    yield self._text(block, text)
            case {"type": "input_json_delta", "partial_json": piece} if block.type == "tool_use":
                written = piece if isinstance(piece, str) else _encode_json(piece)
                if written and (block.pieces or written != "{}"):  # arguments may follow an empty object
                    block.pieces.append(written)
                    yield _arguments(block.number, written)
            case {"type": "thinking_delta"} | {"type": "text_delta"} if block.type == "thinking":
                yield from self._add_thought(block, delta.get("thinking") or delta.get("text"))
            case {"type": "thinking_delta", "thinking": str() as thought} if block.type == "text" and thought:
                yield TextDelta(0, "", extra=dict.fromkeys(REASONING_FIELDS, thought))
            case {"type": "signature_delta", "signature": str() as signature} if block.type == "thinking":
                block.signature += signature
            case {"type": "text_delta" | "input_json_delta" as kind} if block.type in ("text", "tool_use"):
                raise AnswerBroken(f"a block of {block.type} got a {kind}")
            case _ if block.is_foreign or (block.type == "text" and delta.get("type") != "text_delta"):
                block.add(delta)
                self._has_foreign = True
                yield TextDelta(0, "", block={"type": "content_block_delta", "delta": dict(delta)})
            case _ if _has_beyond(delta, _READ_OF_TEXT):
                block.add(delta)
                self._has_foreign = True

    def _fill_empty_call(self) -> Iterator[TextDelta]:
        """Yields the arguments of a call without any, once it is known not to be cut before them."""
        if self._empty_call is not None:
            yield _arguments(self._empty_call.number, "{}")
            self._empty_call = None

    def _add_thought(self, block: OpenBlock, thought: object) -> Iterator[TextDelta]:
        if text := _text(thought):
            block.pieces.append(text)
            yield TextDelta(0, "", extra=dict.fromkeys(REASONING_FIELDS, text))

    def _close(self, block: OpenBlock) -> Iterator[TextDelta]:
        match block.type:
            case "tool_use" if not block.pieces:
                # If no piece of the arguments has come, they are those in the start of the block.
                given = block.start.get("input")
                if given:
                    yield _arguments(block.number, given if isinstance(given, str) else _encode_json(given))
                else:
                    self._empty_call = block
            case "thinking" if block.signature:
                thought = {"type": "thinking", "thinking": "".join(block.pieces), "signature": block.signature}
                yield self._thinking_block(block, thought)
            case "redacted_thinking" if isinstance(block.start.get("data"), str):
                yield self._thinking_block(block, {"type": "redacted_thinking", "data": block.start["data"]})
            case _ if block.is_foreign:
                yield TextDelta(0, "", block={"type": "content_block_stop"})

    def _thinking_block(self, block: OpenBlock, thought: dict[str, Any]) -> TextDelta:
        # Entries of lists in chunks have an index, by which clients put them together. The position is that among the
        # texts and calls.
        entry = {"index": self._thought_count, **thought, "position": block.number}
        self._thought_count += 1
        return TextDelta(0, "", extra={"thinking_blocks": [entry]})

    def _end(self, fields: Mapping[str, Any]) -> Iterator[TextDelta]:
        """Reads a ``message_delta``, of which several may come; the last reason and the last counts hold."""
        self._merge_counts(fields.get("usage"))
        counted = {name: count for name, count in self._counts.items() if count != 0 or name in _OUTPUT_COUNT}
        self.usage = read_usage(counted)
        delta = fields.get("delta")
        for members in (fields, delta):
            self._keep_members(members)
        reason = delta.get("stop_reason") if isinstance(delta, dict) else None
        if not isinstance(reason, str) or not isinstance(delta, dict):
            return
        stop = _text(delta.get("stop_sequence")) or None
        finish = parse_finish_reason(reason, has_calls=bool(self._call_count) and stop is None)
        if finish is None:
            return
        for block in self._blocks.values():
            yield from self._close(block)
        self._blocks.clear()
        self._finish = finish
        if finish is not FinishReason.LENGTH:
            yield from self._fill_empty_call()
        yield TextDelta(
            0,
            "",
            finish,
            extra=_foreign_members(self._order) if self._has_foreign else None,
            stop=stop if finish is FinishReason.STOP else None,
            metadata=ChunkMetadata(self._members) if self._members else None,
        )

    def _keep_members(self, members: object) -> None:
        """Keeps the members of a message, or of the event that ends it, that are not read here."""
        if isinstance(members, dict):
            self._members |= {
                name: value for name, value in members.items() if name not in _READ_OF_MESSAGE and not is_empty(value)
            }

    def _decode(self, event: SSEEvent) -> dict[str, Any]:
        """Decodes an event; an event without content is an empty object.

        Raises:
            AnswerBroken: The event is no JSON object.
            AnswerFailed: The event is an error.
        """
        if event.data.strip() in _END_MARKERS:
            return {}
        fields, is_mended = decode_event(event.data.strip().encode("utf-8", "surrogateescape"))
        if fields is None and event.type != "error" and event.data.strip().isalnum():
            return {}  # a word that keeps the connection alive
        if event.type == "error" and not (isinstance(fields, dict) and "error" in fields):
            fields = {"error": fields or replace_surrogates(event.data.strip())}
        if not isinstance(fields, dict):
            raise AnswerBroken("it sent an event that is no JSON object")
        if is_mended or self._characters.held:
            place = fields.get("index", self._latest_index)
            fields = {
                name: self._characters.join((place, name), value) if name == "delta" else replace_surrogates(value)
                for name, value in fields.items()
            }
        if not isinstance(fields.get("type"), str) and event.type != "message":
            fields["type"] = event.type  # the name of the event says it, too
        _raise_error(fields)
        if not isinstance(fields.get("type"), str) and _text(fields.get("message")):
            self._untyped = fields
        return fields

    def _merge_counts(self, counts: object, without: str = "") -> None:
        """Merges counts, which are running totals; an omitted count keeps its previous value."""
        if not isinstance(counts, dict):
            return
        for name, count in counts.items():
            if count is not None and name != without:
                earlier = self._counts.get(name)
                # Some servers count the prompt in the first event and send a zero in the last one.
                if not (count == 0 and isinstance(earlier, int)):
                    self._counts[name] = count


def _raise_error(fields: Mapping[str, Any]) -> None:
    error = fields.get("error")
    if fields.get("type") == "error" or not is_empty(error):
        reported = error if isinstance(error, dict) else fields
        error_type = "" if reported is fields else _text(reported.get("type"))
        raise AnswerFailed(error_type, _text(error) or _text(reported.get("message")), fields)


def _tool_call(block: Mapping[str, Any], number: int) -> dict[str, Any]:
    name = block.get("name")
    if not isinstance(name, str) or not name:
        raise AnswerBroken(f"the call of a tool ({number}) has no name")
    call_id = _text(block.get("id")) or new_object_id("call")
    others = {name: value for name, value in block.items() if name not in _READ_OF_CALL and not is_empty(value)}
    function = {"name": name, "arguments": ""}
    return {**others, "index": number, "id": call_id, "type": "function", "function": function}


def _has_beyond(block: Mapping[str, Any], read: frozenset[str]) -> bool:
    return any(not is_empty(value) for name, value in block.items() if name not in read)


def _foreign_members(blocks: Sequence[OpenBlock]) -> dict[str, Any]:
    """Returns what chat completions have no place for: all blocks, and the citations of web pages as annotations."""
    annotations = []
    begin = 0
    for block in blocks:
        if block.type != "text":
            continue
        end = begin + sum(map(len, block.pieces))
        for citation in block.citations:
            if isinstance(citation, dict) and isinstance(url := citation.get("url"), str):
                cited = {"url": url, "title": citation.get("title") or "", "start_index": begin, "end_index": end}
                annotations.append({"type": "url_citation", "url_citation": cited})
        begin = end
    members: dict[str, Any] = {"annotations": annotations} if annotations else {}
    return members | {"content_blocks": [block.whole() for block in blocks]}


def _arguments(number: int, piece: str) -> TextDelta:
    return TextDelta(0, "", extra={"tool_calls": [{"index": number, "function": {"arguments": piece}}]})


def _encode_json(value: object) -> str:
    return msgspec.json.encode(value).decode("utf-8")


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
