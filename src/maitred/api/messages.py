"""Route `POST /v1/messages`: Anthropic's API for all models of the gateway.

A request is converted into the equivalent chat completion and then takes the same path; only the response has another
format.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, to_builtins
from msgspec.structs import replace

from maitred.api.chat import to_inference_request
from maitred.api.dialect import ANTHROPIC
from maitred.api.exchange import HttpExchange
from maitred.api.headers import apply_request_headers
from maitred.api.routes import Route
from maitred.api.streaming import CollectedChoice, send_response
from maitred.core.context import RequestContext
from maitred.core.ids import new_object_id
from maitred.core.inference import ChunkMetadata, InferenceRequest, NativeRequest, TextDelta
from maitred.core.request import FinishReason, Usage
from maitred.core.service import InferenceService, PromptTokens
from maitred.core.tenancy import Scope
from maitred.wire.anthropic.content import (
    citation_event,
    members_of,
    members_of_call,
    to_citations,
    to_images,
    type_of,
    usage_fields,
    whole_block,
)
from maitred.wire.anthropic.context_edits import apply_edits
from maitred.wire.anthropic.decode import check_betas, check_version, decode_count_tokens, decode_messages
from maitred.wire.anthropic.inbound import to_chat, to_constraint, to_openai_fields, wants_thinking
from maitred.wire.anthropic.requests import CountTokensRequest, MessagesRequest
from maitred.wire.anthropic.responses import (
    BlockDelta,
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStop,
    MessageDelta,
    MessagesAnswer,
    MessageStart,
    MessageStop,
    MessageUsage,
    OriginalTokens,
    StopDelta,
    StreamEvent,
    TokenCount,
    encode,
    encode_stream_event,
)
from maitred.wire.openai.fields import without_positions
from maitred.wire.openai.requests import ChatRequest
from maitred.wire.openai.responses import CONTINUED, REASONING_FIELDS, THOUGHT_FIELDS
from maitred.wire.openai.tool_calls import is_json_object
from maitred.wire.openai.written import merge_deltas, merge_metadata, thinking_blocks, whole_thinking_blocks
from maitred.wire.sse import EventTemplate

R = TypeVar("R", MessagesRequest, CountTokensRequest)

_TEXT, _THOUGHT, _REDACTED, _SIGNATURE, _FOREIGN = -1, -2, -3, -4, -5
_READ_OF_DELTA = frozenset({*THOUGHT_FIELDS, "refusal", "tool_calls", "content_blocks"})
_THOUGHTS = frozenset({"thinking", "redacted_thinking"})
_STOP_REASONS: Mapping[FinishReason, str] = {
    FinishReason.STOP: "end_turn",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
    FinishReason.PAUSE: "pause_turn",
}


class MessagesRoutes:
    """Routes of Anthropic's API: messages, and the number of their tokens.

    Args:
        answering: The inference service behind the API.
        strict: Whether unknown fields are refused.
        heartbeat_s: Longest time in seconds without an event on a stream.
    """

    def __init__(self, answering: InferenceService, *, strict: bool, heartbeat_s: float) -> None:
        self._service = answering
        self._strict = strict
        self._heartbeat_s = heartbeat_s

    def routes(self) -> list[Route]:
        """Returns the routes of messages and of counting their tokens."""
        return [
            Route(
                "POST",
                "/v1/messages",
                self.create,
                "Answer a conversation in the form of Anthropic's API.",
                reads=MessagesRequest,
                returns=MessagesAnswer,
                streams=StreamEvent,
                needs=Scope.INFERENCE,
                idempotent=True,
                dialect=ANTHROPIC,
                least_output=1,
            ),
            Route(
                "POST",
                "/v1/messages/count_tokens",
                self.count,
                "How many tokens a conversation is to the model.",
                reads=CountTokensRequest,
                returns=TokenCount,
                needs=Scope.INFERENCE,
                dialect=ANTHROPIC,
            ),
        ]

    async def create(self, exchange: HttpExchange) -> None:
        """Answers a conversation, whole or as a stream."""
        check_version(exchange.header(b"anthropic-version"))
        request = await exchange.decode(decode_messages, strict=self._strict)
        edited, applied_edits = await self._edit_context(exchange, request)
        chat = to_chat(edited)
        inference_request = replace(
            apply_request_headers(
                self._to_inference_request(exchange, request, chat), exchange.header, retries=exchange.retries
            ),
            whole=not request.streams,
            constraint=partial(to_constraint, request),
            to_openai=partial(to_openai_fields, request, chat),
        )
        async with self._service.generate(inference_request, exchange.context) as answer:
            answer_id = exchange.id_for("msg").replace("-", "_")
            shape = MessagesFormatter(
                answer_id, exchange.context, thoughts=wants_thinking(request), applied_edits=applied_edits
            )
            await send_response(
                exchange, answer, shape, choices=1, streams=request.streams, heartbeat_s=self._heartbeat_s
            )

    async def count(self, exchange: HttpExchange) -> None:
        """Counts the tokens of a conversation as the model would read them."""
        check_version(exchange.header(b"anthropic-version"))
        request = await exchange.decode(decode_count_tokens, strict=self._strict)
        counted = await self._count_tokens(exchange, request)
        if counted.reported is not None:
            await exchange.respond(encode(counted.reported))
            return
        exchange.context.ignored_fields = request.ignored_fields
        _, applied_edits = await self._edit_context(exchange, request)
        original = counted.tokens
        body = TokenCount(
            input_tokens=original - sum(edit["cleared_input_tokens"] for edit in applied_edits or ()),
            context_management=UNSET if applied_edits is None else OriginalTokens(original_input_tokens=original),
            estimated=counted.estimated or UNSET,
        )
        await exchange.respond(encode(body))

    async def _edit_context(self, exchange: HttpExchange, request: R) -> tuple[R, Sequence[Mapping[str, Any]] | None]:
        """Applies the edits of the context; returns a description of those that removed something, None: none asked."""
        if request.context_management is None or request.beyond_chat is not None:
            return request, None

        async def count(shorter: CountTokensRequest) -> int:
            return (await self._count_tokens(exchange, shorter)).tokens

        return await apply_edits(request, count)

    async def _count_tokens(self, exchange: HttpExchange, request: CountTokensRequest) -> PromptTokens:
        inference_request = self._to_inference_request(exchange, request, to_chat(request))
        return await self._service.count_tokens(exchange.principal, inference_request)

    def _to_inference_request(
        self, exchange: HttpExchange, request: CountTokensRequest, chat: ChatRequest
    ) -> InferenceRequest:
        """Converts a request, whose chat completion is known, into an inference request."""
        inference_request = to_inference_request(chat)
        betas = exchange.header(b"anthropic-beta")
        check_betas(betas)
        headers = {} if betas is None else {"anthropic-beta": betas}
        native = NativeRequest("messages", request.sent, headers, request.beyond_chat)
        return replace(
            inference_request,
            native=native if request.sent else None,
            needs=tuple(map(without_positions, inference_request.needs)),
            left_out=request.ignored_fields,
        )


class MessagesFormatter:
    """Writes one message, with a block for its reasoning, one for its text and one for each tool call.

    Args:
        answer_id: The id of the answer.
        context: The request context, for its usage so far and the model that answers.
        thoughts: Whether the client wants the reasoning text.
        applied_edits: Edits of the context that were made here; None: none were asked for.
    """

    def __init__(
        self,
        answer_id: str,
        context: RequestContext,
        *,
        thoughts: bool = False,
        applied_edits: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self._id = answer_id
        self._context = context
        self._thoughts = thoughts
        self._applied_edits = applied_edits
        self._stop = StopDelta()
        self._block = -1
        """Index of the block that was started last."""
        self._of: int | None = None
        """Kind of the open block: the number of a tool call, `_TEXT` or `_THOUGHT`; None: no block is open."""
        self._has_unsigned_thought = False
        """Whether text of the reasoning has come since the last signature."""
        self._calls: dict[int, _ToolUse] = {}
        self._waiting: list[tuple[int, Any]] = []
        """Blocks that wait for the end of the open call: their kind, and the text or the event if they are no calls."""
        self._citations: list[dict[str, Any]] = []
        """Citations that came before the text that they belong to."""
        self._others: list[dict[str, Any]] = []
        """Members of deltas that a message has no block for; they are told at its end."""
        self._metadata = ChunkMetadata()
        """Members that the server sent around its deltas."""
        self._template: EventTemplate | None = None
        """Template for the text of this block; None: the block has had no text yet."""

    def start(self) -> bytes:
        """Returns the event that starts the message, without its content."""
        return encode_stream_event(MessageStart(message=self._answer([], StopDelta(), self._context.usage)))

    def events(self, parts: Sequence[TextDelta]) -> bytes:
        """Returns events for new text, for each new piece of a tool call, and for the start and end of blocks."""
        return b"".join([self._plain(part.text) if part.plain else self._encode_part(part) for part in parts])

    def end(self, usage: Usage) -> bytes:
        """Returns the events with the stop reason and the usage."""
        ended: StreamEvent | dict[str, Any] = MessageDelta(delta=self._stop, usage=MessageUsage.of(usage))
        others = merge_deltas(self._others)
        if self._citations:
            others["annotations"] = [*self._citations, *others.get("annotations", ())]
        members = members_of(self._metadata, others, self._stop.stop_sequence) | self._own_members()
        if members or usage.details:
            # Anthropic tells these beside the delta, everything else of a message within it.
            beside = {name: members.pop(name) for name in ("context_management",) if name in members}
            delta = {**members, **to_builtins(self._stop)}
            ended = {"type": "message_delta", "delta": delta, "usage": usage_fields(usage), **beside}
        return encode_stream_event(ended) + encode_stream_event(MessageStop())

    def whole(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        """Returns the answer as one JSON object."""
        (choice,) = choices
        extra = merge_deltas(choice.extras)
        metadata = choice.whole_metadata() if choice.metadata else ChunkMetadata()
        others = self._others_of(extra)
        text = "".join(choice.text) + extra.get("refusal", "")
        if blocks := extra.get("content_blocks"):
            content = list(map(whole_block, self._visible_blocks(blocks)))
        else:
            thought = "".join(map(self._thought_in, choice.extras))
            content = self._blocks_of(text, thought, extra, others)
        finish = choice.finish
        if finish is FinishReason.TOOL_CALLS and all(type_of(block) != "tool_use" for block in content):
            finish = FinishReason.STOP
        answer = self._answer([], _stop_of(finish, choice.stop), usage)
        members = members_of(metadata, others, choice.stop) | self._own_members()
        return encode({**members, **to_builtins(answer), "content": content, "usage": usage_fields(usage)})

    def _own_members(self) -> dict[str, Any]:
        """Returns the members of the message about the edits of the context, unless its server has made them."""
        if self._applied_edits is None or self._context.is_passthrough:
            return {}
        return {"context_management": {"applied_edits": self._applied_edits}}

    def _blocks_of(self, text: str, thought: str, extra: Mapping[str, Any], others: dict[str, Any]) -> list[Any]:
        """Returns the blocks of a whole answer of chat completions; takes what becomes one out of the other members."""
        cited, annotations = to_citations(others.pop("annotations", None))
        if cited and not text:
            cited, annotations = [], [*annotations, *cited]
        if annotations:
            others["annotations"] = annotations
        images, unread = to_images(others.pop("images", None))
        if unread:
            others["images"] = unread
        # Clients send an answer back within the next conversation, and an empty block would be an error there.
        content: list[Any] = [ContentBlock(type="text", text=text)] if text else []
        if cited:
            content = [{"type": "text", "text": text, "citations": cited}]
        content += map(_tool_use, extra.get("tool_calls", ()))
        signed = self._signed_blocks(extra)
        if thought and not signed:
            signed = [(0, _thinking(thought))]
        for position, block in reversed(signed):
            content.insert(position, block)
        return content + images

    def _plain(self, text: str) -> bytes:
        """Returns the events for a delta that has only text."""
        if self._of != _TEXT:
            return self._encode_events(self._add(_TEXT, text))
        if self._template is None:
            self._template = EventTemplate(lambda text: encode_stream_event(self._text(text)))
        return self._template.encode(text)

    def _encode_part(self, part: TextDelta) -> bytes:
        events = self._events(part)
        return self._encode_events(_mark_first_delta(events) if part.continued else events)

    def _encode_events(self, events: Iterable[StreamEvent | dict[str, Any]]) -> bytes:
        return b"".join(map(encode_stream_event, events))

    def _text(self, text: str) -> ContentBlockDelta:
        return ContentBlockDelta(index=self._block, delta=BlockDelta(type="text_delta", text=text))

    def _events(self, part: TextDelta) -> Iterator[StreamEvent | dict[str, Any]]:
        extra = part.extra or {}
        if part.continued:  # what the first server said of itself is not true of the next one
            self._metadata = ChunkMetadata()
        if part.metadata is not None:
            self._metadata = ChunkMetadata(
                {**self._metadata.chunk, **part.metadata.chunk},
                merge_metadata((self._metadata.choice, part.metadata.choice)),
            )
        if part.block is not None:
            yield from self._add(_FOREIGN, part.block)
        if thought := self._thought_in(extra):
            self._has_unsigned_thought = True
            yield from self._add(_THOUGHT, thought)
        for block in thinking_blocks(extra) if self._thoughts else ():
            yield from self._add_signed_block(block)
        if text := part.text + extra.get("refusal", ""):
            yield from self._add(_TEXT, text)
        for piece in extra.get("tool_calls", ()):
            yield from self._call(piece)
        if not _READ_OF_DELTA.issuperset(extra):
            yield from self._add_others(self._others_of(extra))
        if part.finish is not None:
            self._stop = _stop_of(part.finish, part.stop)
            yield from self._write_waiting(at_end=True)
            yield from self._close()

    def _others_of(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the members of a delta that are neither text nor thoughts nor calls of functions."""
        hidden = () if self._thoughts else ("reasoning_details",)
        # Of a server that speaks Messages, the blocks have the annotations already.
        hidden = (*hidden, "annotations") if "content_blocks" in extra else hidden
        return {name: value for name, value in extra.items() if name not in _READ_OF_DELTA and name not in hidden}

    def _add_others(self, others: dict[str, Any]) -> Iterator[StreamEvent | dict[str, Any]]:
        """Writes the citations and images in a delta, and keeps what a message has no block for."""
        cited, annotations = to_citations(others.pop("annotations", None))
        images, unread = to_images(others.pop("images", None))
        for citation in cited:
            if self._of == _TEXT:
                yield from self._add(_FOREIGN, citation_event(citation))
            else:
                self._citations.append(citation)
        for image in images:
            yield from self._add(_FOREIGN, {"type": "content_block_start", "content_block": image})
            yield from self._add(_FOREIGN, {"type": "content_block_stop"})
        more = {"annotations": annotations, "images": unread}
        others |= {name: entries for name, entries in more.items() if entries}
        if others:
            self._others.append(others)

    def _visible_blocks(self, blocks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the blocks of a server that speaks Messages, without thoughts that the client does not want."""
        return [block for block in blocks if self._thoughts or block.get("type") not in _THOUGHTS]

    def _thought_in(self, extra: Mapping[str, Any]) -> str:
        """Returns the reasoning text in a delta, under any of its names, if the client wants to see it."""
        return next((extra[name] for name in REASONING_FIELDS if name in extra), "") if self._thoughts else ""

    def _add_signed_block(self, block: Mapping[str, Any]) -> Iterator[StreamEvent | dict[str, Any]]:
        """Writes an entry of ``thinking_blocks``, whose text has mostly come before its signature."""
        match block:
            case {"type": "redacted_thinking", "data": str() as data}:
                yield from self._add(_REDACTED, data)
            case {"signature": str() as signature} if signature:
                thought = block.get("thinking")
                if not self._has_unsigned_thought and isinstance(thought, str):
                    yield from self._add(_THOUGHT, thought)
                self._has_unsigned_thought = False
                yield from self._add(_SIGNATURE, signature)

    def _signed_blocks(self, extra: Mapping[str, Any]) -> list[tuple[int, ContentBlock]]:
        """Returns the signed blocks of a whole answer, each with its position among the other blocks."""
        blocks: list[tuple[int, ContentBlock]] = []
        for entry in whole_thinking_blocks(thinking_blocks(extra)) if self._thoughts else ():
            position = entry.get("position")
            place = position if isinstance(position, int) else 0
            if entry.get("type") == "redacted_thinking":
                block = ContentBlock(type="redacted_thinking", data=entry["data"])
            else:
                block = ContentBlock(type="thinking", thinking=entry["thinking"], signature=entry["signature"])
            blocks.append((place, block))
        return blocks

    def _add(self, of: int, text: Any) -> Iterator[StreamEvent | dict[str, Any]]:  # noqa: ANN401 - a text, or an event
        """Writes a text, a part of a thought or an event, or lets it wait for the call before it."""
        if self._is_call_open:
            self._waiting.append((of, text))
            yield from self._write_waiting()
        else:
            yield from self._write(of, text)

    def _write(self, of: int, text: Any) -> Iterator[StreamEvent | dict[str, Any]]:  # noqa: ANN401 - a text, or an event
        if of == _FOREIGN:
            yield from self._write_foreign(text)
        elif of == _REDACTED:
            yield from self._open(_REDACTED, ContentBlock(type="redacted_thinking", data=text))
            yield from self._close()
        elif of == _TEXT:
            if self._of != _TEXT:
                yield from self._open(_TEXT, ContentBlock(type="text", text=""))
            yield self._text(text)
            while self._citations:
                yield {**citation_event(self._citations.pop(0)), "index": self._block}
        else:
            if self._of != _THOUGHT:
                yield from self._open(_THOUGHT, _thinking(""))
            if of == _SIGNATURE:
                delta = BlockDelta(type="signature_delta", signature=text)
                yield ContentBlockDelta(index=self._block, delta=delta)
                yield from self._close()
            elif text:
                yield ContentBlockDelta(index=self._block, delta=BlockDelta(type="thinking_delta", thinking=text))

    def _write_foreign(self, event: Mapping[str, Any]) -> Iterator[StreamEvent | dict[str, Any]]:
        """Writes an event of the server for a block that chat completions have no place for."""
        match event["type"]:
            case "content_block_start":
                of = _TEXT if event["content_block"].get("type") == "text" else _FOREIGN
                yield from self._open(of, event["content_block"])
            case "content_block_stop":
                yield from self._close()
            case _:
                if self._of not in (_TEXT, _FOREIGN):
                    yield from self._open(_TEXT, ContentBlock(type="text", text=""))
                yield {**event, "index": self._block}

    def _call(self, piece: Mapping[str, Any]) -> Iterator[StreamEvent | dict[str, Any]]:
        """Writes a piece of a tool call, or lets it wait for the call before it.

        The pieces of several calls can come in turns, but blocks follow one another.
        """
        number = piece.get("index") or 0
        call = self._calls.get(number)
        if call is None:
            call = self._calls[number] = _ToolUse()
            self._waiting.append((number, ""))
        call.add(piece)
        if number == self._of:
            yield from self._write_call(call)
        yield from self._write_waiting()

    def _write_call(self, call: "_ToolUse", *, at_end: bool = False) -> Iterator[StreamEvent | dict[str, Any]]:
        """Writes the new arguments of the open call; the block starts with them, because the name is whole then."""
        if at_end:
            call.end()
        if call.unwritten or at_end:
            if not call.is_started:
                call.is_started = True
                call.id = call.id or new_object_id("toolu")
                begun = {**call.members, "type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                yield {"type": "content_block_start", "index": self._block, "content_block": begun}
            if call.unwritten:
                delta = BlockDelta(type="input_json_delta", partial_json=call.take())
                yield ContentBlockDelta(index=self._block, delta=delta)

    def _write_waiting(self, *, at_end: bool = False) -> Iterator[StreamEvent | dict[str, Any]]:
        """Writes what waits, up to a call whose arguments are not whole; at the end, all of it."""
        while True:
            if self._is_call_open:
                call = self._calls[self._of or 0]
                if not (at_end or (self._waiting and is_json_object(call.arguments))):
                    return
                yield from self._write_call(call, at_end=True)
                yield from self._close()
            if not self._waiting:
                return
            of, text = self._waiting.pop(0)
            if of < 0:
                yield from self._write(of, text)
            else:
                yield from self._close()
                self._block, self._of, self._template = self._block + 1, of, None
                yield from self._write_call(self._calls[of])

    @property
    def _is_call_open(self) -> bool:
        return self._of is not None and self._of >= 0

    def _open(self, of: int, block: ContentBlock | Mapping[str, Any]) -> Iterator[StreamEvent | dict[str, Any]]:
        yield from self._close()
        self._block, self._of, self._template = self._block + 1, of, None
        yield {"type": "content_block_start", "index": self._block, "content_block": block}

    def _close(self) -> Iterator[StreamEvent | dict[str, Any]]:
        if self._of is not None:
            self._of = None
            yield ContentBlockStop(index=self._block)

    def _answer(self, content: list[ContentBlock], stop: StopDelta, usage: Usage) -> MessagesAnswer:
        return MessagesAnswer(
            id=self._id,
            model=self._context.model,
            content=content,
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=MessageUsage.of(usage),
        )


class _ToolUse:
    """Tool call of a stream, put together from its pieces.

    Attributes:
        id: Id of the call.
        name: Name of the tool.
        arguments: Arguments so far. The input of a custom call, which is a text, is their member ``input``.
        members: Members that the server sent beside these.
        is_started: Whether the start of its block was written.
    """

    __slots__ = ("_is_text_open", "_written_length", "arguments", "id", "is_started", "members", "name")

    def __init__(self) -> None:
        self.id = self.name = self.arguments = ""
        self._is_text_open = False
        self.members: dict[str, Any] = {}
        self.is_started = False
        self._written_length = 0

    def add(self, piece: Mapping[str, Any]) -> None:
        """Adds one piece of the call."""
        self.id = self.id or piece.get("id") or ""
        body = piece.get("function") or piece.get("custom") or {}
        self.name += body.get("name") or ""
        self.members |= members_of_call(piece)
        if "custom" in piece:
            if not self._is_text_open:
                self._is_text_open = True
                self.arguments = '{"input":"'
            self.arguments += msgspec.json.encode(body.get("input") or "")[1:-1].decode()
        else:
            self.arguments += body.get("arguments") or ""

    def end(self) -> None:
        """Ends the arguments of a custom call."""
        if self._is_text_open:
            self._is_text_open = False
            self.arguments += '"}'

    @property
    def unwritten(self) -> bool:
        """Whether some arguments were not written yet."""
        return len(self.arguments) > self._written_length

    def take(self) -> str:
        """Returns the arguments that were not written yet."""
        rest, self._written_length = self.arguments[self._written_length :], len(self.arguments)
        return rest


def _stop_of(finish: FinishReason, stop: str | int | None) -> StopDelta:
    """Returns the stop reason in Anthropic's words. An incomplete answer gets the one for too many tokens."""
    if isinstance(stop, str):
        return StopDelta(stop_reason="stop_sequence", stop_sequence=stop)
    return StopDelta(stop_reason=_STOP_REASONS.get(finish, "max_tokens"))


def _mark_first_delta(events: Iterable[StreamEvent | dict[str, Any]]) -> Iterator[StreamEvent | dict[str, Any]]:
    """Marks the first addition to a block as the place where another server goes on."""
    is_marked = False
    for event in events:
        if not is_marked and isinstance(event, ContentBlockDelta):
            is_marked = True
            yield replace(event, maitred=CONTINUED)
        else:
            yield event


def _thinking(thought: str) -> ContentBlock:
    """Makes the content block of a reasoning text, without a signature."""
    return ContentBlock(type="thinking", thinking=thought, signature="")


def _tool_use(call: Mapping[str, Any]) -> ContentBlock | dict[str, Any]:
    """Returns the block of a tool call; one that is cut off, or no JSON object, becomes text: no client can run it."""
    members = members_of_call(call)
    if call["type"] == "custom":
        # Its input is a text, for which a block of Messages has no other place.
        custom = call["custom"]
        given = {"input": custom["input"]}
        return {**members, "type": "tool_use", "id": call["id"], "name": custom["name"], "input": given}
    name, written = call["function"]["name"], call["function"]["arguments"]
    try:
        arguments = msgspec.json.decode(written or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        return {**members, "type": "tool_use", "id": call["id"], "name": name, "input": arguments}
    return ContentBlock(type="text", text=f"{name}({written}")
