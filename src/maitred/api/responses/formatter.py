"""Writes one answer as a response of OpenAI's Responses API, whole or as a stream of events.

An answer is a list of items: reasoning, messages and calls. Each has an index in the output, so the items of several
calls may be open at once. The item of a text is complete before the next item begins. A server that speaks this API
has items of its own, which are passed on (`maitred.api.responses.passthrough`).
"""

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import msgspec
from msgspec import UNSET, to_builtins
from msgspec.structs import replace

from maitred.api.responses.items import has_fit_id
from maitred.api.responses.passthrough import PassthroughOutput
from maitred.api.streaming import CollectedChoice
from maitred.core.context import RequestContext
from maitred.core.errors import MaitredError, Refused
from maitred.core.ids import new_object_id
from maitred.core.inference import ChunkMetadata, TextDelta, TokenScore
from maitred.core.request import FinishReason, Usage
from maitred.core.service import ResponseStream
from maitred.wire.openai.responses import REASONING_FIELDS, THOUGHT_FIELDS, score_entries
from maitred.wire.openai.tool_calls import is_json_object
from maitred.wire.openai.written import merge_deltas, merge_metadata, thinking_blocks, whole_thinking_blocks
from maitred.wire.responses.compaction import CompactedWindow
from maitred.wire.responses.requests import encode_thoughts
from maitred.wire.responses.resource import (
    IncompleteDetails,
    ItemStatus,
    OutputCompaction,
    OutputCustomCall,
    OutputFunctionCall,
    OutputMessage,
    OutputReasoning,
    OutputRefusal,
    OutputText,
    ReasoningText,
    ResponseEvent,
    ResponseFault,
    ResponseResource,
    ResponseUsage,
    Status,
    encode,
    encode_response_event,
)
from maitred.wire.sse import JsonTemplate, encode_event, encode_text

_READ_OF_DELTA = frozenset({*THOUGHT_FIELDS, "refusal", "tool_calls", "annotations"})
_CONTINUED = {"continued": True}
_INCOMPLETE: Mapping[FinishReason, IncompleteDetails] = {
    FinishReason.LENGTH: IncompleteDetails(reason="max_output_tokens"),
    FinishReason.DEADLINE: IncompleteDetails(reason="max_output_tokens", stop_reason="deadline"),
    FinishReason.CONTENT_FILTER: IncompleteDetails(reason="content_filter"),
}


class ResponsesFormatter:
    """Formatter of one response, which writes it whole or as events.

    Args:
        resource: The response without its output.
        context: The request context, for the model that answers.
        custom_tools: Names of the tools whose input is a text; the model may have called one as a function.
        with_logprobs: Whether the client wants log-probabilities.
        with_encrypted_reasoning: Whether the client wants the reasoning for its next request.

    Attributes:
        resource: The response as far as it is known, without the output of one that is in progress.
        digits: Digits of its id, which the ids of its items have too.
        has_started: Whether the answer has begun.
    """

    has_started = False

    def __init__(
        self,
        resource: ResponseResource,
        context: RequestContext,
        *,
        custom_tools: frozenset[str] = frozenset(),
        with_logprobs: bool = False,
        with_encrypted_reasoning: bool = False,
    ) -> None:
        self.resource = resource
        self._context = context
        self._custom_tools = custom_tools
        self._with_logprobs = with_logprobs
        self._with_encrypted_reasoning = with_encrypted_reasoning
        self.digits = resource.id.rpartition("_")[2]
        self._sequence_number = -1
        self._output: list[dict[str, Any]] = []
        """Items by their index, each as it was written last."""
        self._thoughts: dict[int, str] = {}
        """Index of a reasoning item -> its signed thoughts, which the server needs again in a later request."""
        self._text: _TextItem | None = None
        self._calls: dict[int, _CallItem] = {}
        self._others: list[dict[str, Any]] = []
        self._metadata = ChunkMetadata()
        self._finish: FinishReason | None = None
        self._passthrough: PassthroughOutput | None = None
        """Output of a server that speaks this API itself; None: it speaks another one, or has not answered yet."""
        self._compacted: Usage | None = None
        """Usage of the compaction before the answer; None: there was none."""

    @property
    def last_event(self) -> int | None:
        """Sequence number of the last event; None: there was none."""
        return None if self._sequence_number < 0 else self._sequence_number

    def queue(self) -> bytes:
        """Returns the events that begin a response in the background, before its answer begins."""
        return self._begin("created", "queued")

    def start(self) -> bytes:
        """Returns the events that begin the answer, without its output."""
        self.has_started = True
        self.resource = self._current("in_progress")
        begun = self._begin("in_progress") if self._sequence_number >= 0 else self._begin("created", "in_progress")
        return begun + self._encode(
            ResponseEvent(type=f"response.output_item.{name}", output_index=index, item=item)
            for index, item in enumerate(self._output)  # a compaction item is whole at once
            for name in ("added", "done")
        )

    def _begin(self, *names: str) -> bytes:
        return self._encode(ResponseEvent(type=f"response.{name}", response=self.resource) for name in names)

    @property
    def has_compaction(self) -> bool:
        """Whether the output begins with a compaction item."""
        return self._compacted is not None

    def add_compaction(self, window: CompactedWindow, encrypted_content: str, usage: Usage) -> None:
        """Begins the output with the item of a window; call it before the answer begins."""
        self._compacted = usage
        self._output.append(to_builtins(OutputCompaction.of(self._new_id("cmp"), window, encrypted_content)))

    @property
    def has_ended(self) -> bool:
        """Whether the response is in its last state."""
        return self.resource.status not in ("queued", "in_progress")

    def snapshot(self) -> ResponseResource:
        """Returns the response with its output so far."""
        if self.resource.status != "in_progress":
            return self.resource
        if self._passthrough is not None:
            return replace(self.resource, output=self._passthrough.shown_items())
        output = [*self._output]
        if (item := self._text) is not None and item.kind:
            output[item.index] = {**output[item.index], "content": to_builtins([*item.parts, item.part()])}
        for call in self._calls.values():
            if call.index is not None and not call.is_closed:
                output[call.index] = to_builtins(call.item("in_progress"))
        return replace(self.resource, output=output)

    def events(self, parts: Sequence[TextDelta]) -> bytes:
        """Returns events for new text and calls, and for the start and end of items."""
        if self._context.is_passthrough:
            return b"".join(map(self._pass_on, parts))
        return b"".join([self._plain(part.text) if part.plain else self._encode(self._add(part)) for part in parts])

    async def read(self, answer: ResponseStream) -> AsyncIterator[list[TextDelta]]:
        """Yields the batches of an answer that is sent as a whole, and takes them from a server that speaks this API.

        Such an answer is more than its text and its calls.
        """
        async for parts in answer:
            if self._context.is_passthrough:
                for part in parts:
                    for _ in self._read_passthrough(part):
                        pass
            yield parts

    def end(self, usage: Usage) -> bytes:
        """Returns the event with the whole response."""
        self.complete(usage)
        self._sequence_number += 1
        kind = f"response.{self.resource.status}"
        fields = {"type": kind, "sequence_number": self._sequence_number, "response": msgspec.Raw(self.written())}
        return encode_event(encode(fields), kind.encode("ascii"))

    def whole(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        """Returns the response as one JSON object."""
        self.collect(choices)
        self.complete(usage)
        return self.written()

    def written(self) -> bytes:
        """Returns the response as JSON, with the members that the server sent around its answer."""
        if self._passthrough is not None:
            return encode({**to_builtins(self.resource), **self._passthrough.members})
        if not self._metadata.chunk:
            return encode(self.resource)
        return encode({**self._metadata.chunk, **to_builtins(self.resource)})

    def cancel(self, usage: Usage | None) -> bytes:
        """Returns the event that ends the response as cancelled; OpenAI names none of its own for that.

        Args:
            usage: What is billed; None: the answer had not begun.
        """
        self._break_off()
        self.resource = replace(self._current("cancelled"), output=self._output, usage=self._total_usage(usage))
        return self._encode([ResponseEvent(type="response.incomplete", response=self.resource)])

    def error_events(self, error: MaitredError) -> bytes:
        """Returns the events that end the response with an error."""
        self._break_off()
        # A response has a short list of codes; the event before it has ours.
        code = "rate_limit_exceeded" if isinstance(error, Refused) else "server_error"
        fault = ResponseFault(code=code, message=error.message)
        self.resource = replace(self._current("failed"), error=fault, output=self._output)
        return self._encode(
            [
                ResponseEvent(type="error", code=error.code, message=error.message, param=error.param),
                ResponseEvent(type="response.failed", response=self.resource),
            ]
        )

    def _break_off(self) -> None:
        """Marks the open items of the output as incomplete."""
        if self._passthrough is not None:
            for _ in self._passthrough.close():
                pass
            self._output = self._passthrough.shown_items()
            return
        if self._text is not None:
            self._output[self._text.index] = self._written_text(self._text, "incomplete")
        for call in self._calls.values():
            if call.index is not None and not call.is_closed:
                self._output[call.index] = to_builtins(call.item("incomplete"))

    def collect(self, choices: Sequence[CollectedChoice]) -> None:
        """Takes an answer that came as a whole; a second call does nothing."""
        if self._finish is not None:
            return
        (choice,) = choices
        extra = merge_deltas(choice.extras)
        calls = [{"index": number, **call} for number, call in enumerate(extra.pop("tool_calls", ()))]
        thoughts = {name: extra.pop(name) for name in THOUGHT_FIELDS if name in extra}
        metadata = choice.whole_metadata() if choice.metadata else None
        parts = [
            TextDelta(0, "", extra=thoughts or None, metadata=metadata),
            TextDelta(0, "".join(choice.text), scores=choice.scores, extra=extra or None),
            TextDelta(0, "", extra={"tool_calls": calls} if calls else None, finish=choice.finish),
        ]
        for part in parts:
            for _ in self._add(part):
                pass

    def complete(self, usage: Usage) -> None:
        """Sets the response's final state; a second call does nothing."""
        if self.resource.usage is not None:
            return
        incomplete = _INCOMPLETE.get(self._finish) if self._finish is not None else None
        if self._passthrough is not None:
            self._output = self._passthrough.shown_items()
        resource = self._current("completed" if incomplete is None else "incomplete")
        self.resource = replace(
            resource,
            output=self._output,
            incomplete_details=incomplete,
            completed_at=int(time.time()) if incomplete is None else None,
            usage=self._total_usage(usage),
        )

    def _total_usage(self, usage: Usage | None) -> ResponseUsage | None:
        """Returns the usage of the answer with that of the compaction before it; None: there is neither."""
        parts = [part for part in (self._compacted, usage) if part is not None]
        return ResponseUsage.of(reduce(add, parts)) if parts else None

    def items_to_keep(self) -> list[dict[str, Any]]:
        """Returns the items of the output as the next request needs them, with all signed thoughts."""
        if self._passthrough is not None:
            items = enumerate(self._passthrough.items())
            return [
                item if has_fit_id(item) else {**item, "id": f"item_{self.digits}_{index}"} for index, item in items
            ]
        return [
            {**item, "encrypted_content": self._thoughts[index]} if index in self._thoughts else item
            for index, item in enumerate(self._output)
        ]

    def _current(self, status: Status) -> ResponseResource:
        return replace(self.resource, model=self._context.model or self.resource.model, status=status)

    def _encode(self, events: Iterable[ResponseEvent]) -> bytes:
        encoded = []
        for event in events:
            self._sequence_number += 1
            encoded.append(encode_response_event(replace(event, sequence_number=self._sequence_number)))
        return b"".join(encoded)

    def _pass_on(self, part: TextDelta) -> bytes:
        """Returns the events of a server that speaks this API, with the numbers of this stream."""
        output = self._passthrough
        if output is not None and part.plain and output.plain_place is not None:
            item_id, output_index, content_index = output.plain_place
            output.add_text(part.text)
            self._sequence_number += 1
            values = self._sequence_number, encode_text(item_id), output_index, content_index, encode_text(part.text)
            return _TEXT_DELTA.fill(values)
        encoded = []
        for event in self._read_passthrough(part):
            self._sequence_number += 1
            decided: dict[str, Any] = {"type": event["type"], "sequence_number": self._sequence_number}
            if "response" in event:
                decided["response"] = self.resource
            if "response_id" in event:
                decided["response_id"] = self.resource.id
            encoded.append(encode_event(encode(decided | event | decided), event["type"].encode()))
        return b"".join(encoded)

    def _read_passthrough(self, part: TextDelta) -> Iterator[dict[str, Any]]:
        """Yields the events of a delta of a server that speaks this API."""
        if self._passthrough is None:
            self._passthrough = PassthroughOutput(with_encrypted_reasoning=self._with_encrypted_reasoning)
        if part.finish is not None:
            self._finish = part.finish
        return self._passthrough.read(part)

    def _plain(self, text: str) -> bytes:
        """Returns the events for a delta that has only text."""
        item = self._text
        if item is None or item.kind != "output_text":
            return self._encode(self._write("output_text", text))
        item.texts.append(text)
        self._sequence_number += 1
        values = self._sequence_number, encode_text(item.id), item.index, len(item.parts), encode_text(text)
        return _TEXT_DELTA.fill(values)

    def _add(self, part: TextDelta) -> Iterator[ResponseEvent]:
        extra = part.extra or {}
        if part.continued:  # what the first server said of itself is not true of the next one
            self._metadata = ChunkMetadata()
        if part.metadata is not None:
            self._metadata = ChunkMetadata(merge_metadata((self._metadata.chunk, part.metadata.chunk)))
        if thought := next((extra[name] for name in REASONING_FIELDS if name in extra), ""):
            yield from self._write("reasoning_text", thought)
        for block in thinking_blocks(extra):
            yield from self._add_block(block)
        if part.text or part.scores:
            yield from self._write("output_text", part.text, part.scores, continued=part.continued)
        if refusal := extra.get("refusal"):
            yield from self._write("refusal", refusal)
        for annotation in extra.get("annotations") or ():
            yield from self._annotate(annotation)
        for piece in extra.get("tool_calls", ()):
            yield from self._call(piece)
        if not _READ_OF_DELTA.issuperset(extra):
            self._others.append({name: value for name, value in extra.items() if name not in _READ_OF_DELTA})
        if part.finish is not None:
            self._finish = part.finish
            status: ItemStatus = "incomplete" if part.finish in _INCOMPLETE else "completed"
            if len(self._output) == int(self.has_compaction) and not self._calls:
                yield from self._open("output_text")  # an empty answer is a message without text
            yield from self._close_text(status)
            for call in self._calls.values():
                yield from self._close_call(call, status)

    def _write(
        self, kind: str, text: str, scores: Sequence[TokenScore] | None = None, *, continued: bool = False
    ) -> Iterator[ResponseEvent]:
        """Writes a piece of a text of this kind: of the answer, of a refusal or of the reasoning."""
        yield from self._open(kind)
        item = self._text
        assert item is not None
        item.texts.append(text)
        logprobs = score_entries(scores) if scores and self._with_logprobs else []
        item.logprobs += logprobs
        yield ResponseEvent(
            type=f"response.{kind}.delta",
            **item.place(),
            delta=text,
            logprobs=logprobs if kind == "output_text" else UNSET,
            maitred=_CONTINUED if continued else UNSET,
        )

    def _open(self, kind: str) -> Iterator[ResponseEvent]:
        """Opens a part of this kind, in the open item if it can hold it."""
        item = self._text
        if item is not None and item.kind == kind:
            return
        of = "reasoning" if kind == "reasoning_text" else "message"
        if item is None or item.of != of:
            yield from self._close_text("completed")
            yield from self._close_whole_calls()
            prefix = "rs" if of == "reasoning" else "msg"
            item = self._text = _TextItem(of, self._new_id(prefix), len(self._output))
            self._output.append(self._written_text(item, "in_progress"))
            yield ResponseEvent(
                type="response.output_item.added", output_index=item.index, item=self._output[item.index]
            )
        else:
            yield from self._close_part(item)
        item.kind = kind
        yield ResponseEvent(type="response.content_part.added", **item.place(), part=item.part())

    def _close_part(self, item: "_TextItem") -> Iterator[ResponseEvent]:
        if not item.kind:
            return
        part, place = item.part(), item.place()
        match part:
            case OutputText():
                yield ResponseEvent(type="response.output_text.done", **place, text=part.text, logprobs=part.logprobs)
            case OutputRefusal():
                yield ResponseEvent(type="response.refusal.done", **place, refusal=part.refusal)
            case ReasoningText():
                yield ResponseEvent(type="response.reasoning_text.done", **place, text=part.text)
        yield ResponseEvent(type="response.content_part.done", **place, part=part)
        item.close_part()

    def _close_text(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        if (item := self._text) is None:
            return
        self._text = None
        yield from self._close_part(item)
        written = self._output[item.index] = self._written_text(item, status)
        yield ResponseEvent(type="response.output_item.done", output_index=item.index, item=written)

    def _written_text(self, item: "_TextItem", status: ItemStatus) -> dict[str, Any]:
        """Returns an item of texts in its current state."""
        parts = [*item.parts, item.part()] if item.kind and status != "in_progress" else item.parts
        if item.of == "message":
            message: dict[str, Any] = to_builtins(OutputMessage(id=item.id, status=status, content=parts))
            if status != "in_progress" and self._others:
                message = {**merge_deltas(self._others), **message}
                self._others = []
            return message
        encrypted: Any = None if self._with_encrypted_reasoning else UNSET
        if status != "in_progress":
            text = "\n\n".join(part.text for part in parts)
            blocks = whole_thinking_blocks(item.blocks)
            if blocks:
                self._thoughts[item.index] = encode_thoughts(blocks)
            if self._with_encrypted_reasoning:
                encrypted = self._thoughts.get(item.index) or encode_thoughts([{"type": "thinking", "thinking": text}])
        reasoning = OutputReasoning(id=item.id, status=status, content=parts, encrypted_content=encrypted)
        return to_builtins(reasoning)  # type: ignore[no-any-return]

    def _add_block(self, block: Mapping[str, Any]) -> Iterator[ResponseEvent]:
        """Keeps an entry of ``thinking_blocks``, whose text has mostly come before its signature."""
        if self._text is None or self._text.of != "reasoning":
            yield from self._open("reasoning_text")
        assert self._text is not None
        self._text.blocks.append({name: value for name, value in block.items() if name != "index"})

    def _annotate(self, annotation: Any) -> Iterator[ResponseEvent]:  # noqa: ANN401 - as the server sent it
        """Writes an annotation of the text, such as a citation."""
        yield from self._open("output_text")
        item = self._text
        assert item is not None
        match annotation:
            case {"type": str() as kind, **rest} if isinstance(inner := rest.get(kind), dict):
                annotation = {"type": kind, **inner}
            case dict():
                pass
            case _:
                annotation = {"type": "annotation", "value": annotation}
        item.annotations.append(annotation)
        yield ResponseEvent(
            type="response.output_text.annotation.added",
            **item.place(),
            annotation=annotation,
            annotation_index=len(item.annotations) - 1,
        )

    def _call(self, piece: Mapping[str, Any]) -> Iterator[ResponseEvent]:
        number = piece.get("index") or 0
        call = self._calls.get(number)
        if call is None:
            yield from self._close_text("completed")
            yield from self._close_whole_calls()
            call = self._calls[number] = _CallItem()
        call.add(piece)
        if call.pending and not call.is_function_for(self._custom_tools):
            yield from self._write_call(call)

    def _write_call(self, call: "_CallItem") -> Iterator[ResponseEvent]:
        """Writes what is new of a call; its item begins with the first arguments, because the name is whole then."""
        if call.index is None:
            call.id = self._new_id("ctc" if call.is_custom else "fc")
            call.call_id = call.call_id or new_object_id("call")
            call.index = len(self._output)
            self._output.append(to_builtins(call.item("in_progress")))
            yield ResponseEvent(
                type="response.output_item.added", output_index=call.index, item=self._output[call.index]
            )
        if text := call.take():
            yield ResponseEvent(type=f"{call.event}.delta", item_id=call.id, output_index=call.index, delta=text)

    def _close_whole_calls(self) -> Iterator[ResponseEvent]:
        """Ends the calls whose arguments are whole, because another item begins."""
        for call in self._calls.values():
            if call.is_whole:
                yield from self._close_call(call, "completed")

    def _close_call(self, call: "_CallItem", status: ItemStatus) -> Iterator[ResponseEvent]:
        if call.is_closed:
            return
        if call.is_function_for(self._custom_tools):
            call.become_custom()
        yield from self._write_call(call)
        assert call.index is not None
        call.is_closed = True
        item = call.item(status if status == "completed" or not call.is_whole else "completed")
        written = self._output[call.index] = to_builtins(item)
        done = ResponseEvent(type=f"{call.event}.done", item_id=call.id, output_index=call.index)
        if call.is_custom:
            yield replace(done, input=call.written)
        else:
            yield replace(done, name=call.name, arguments=call.written)
        yield ResponseEvent(type="response.output_item.done", output_index=call.index, item=written)

    def _new_id(self, prefix: str) -> str:
        """Returns the id of the next item, from which the response is found."""
        return f"{prefix}_{self.digits}_{len(self._output)}"


class _TextItem:
    """Message or reasoning that is being written.

    Attributes:
        of: ``message`` or ``reasoning``.
        id: Its id.
        index: Its index in the output.
        kind: Type of the open part; empty: none is open.
        parts: Its complete parts.
        texts: Pieces of the open part.
        blocks: Signed thoughts in pieces.
    """

    def __init__(self, of: str, item_id: str, index: int) -> None:
        self.of = of
        self.id = item_id
        self.index = index
        self.kind = ""
        self.parts: list[Any] = []
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self.blocks: list[dict[str, Any]] = []

    def place(self) -> dict[str, Any]:
        """Returns the fields of an event that say which part it is about."""
        return {"item_id": self.id, "output_index": self.index, "content_index": len(self.parts)}

    def part(self) -> OutputText | OutputRefusal | ReasoningText:
        """Returns the open part in its current state."""
        text = "".join(self.texts)
        match self.kind:
            case "refusal":
                return OutputRefusal(refusal=text)
            case "reasoning_text":
                return ReasoningText(text=text)
        return OutputText(text=text, annotations=[*self.annotations], logprobs=[*self.logprobs])

    def close_part(self) -> None:
        """Moves the open part to the complete ones."""
        self.parts.append(self.part())
        self.kind, self.texts, self.logprobs, self.annotations = "", [], [], []


class _CallItem:
    """Call of a tool that is being written, put together from its pieces.

    Attributes:
        index: Its index in the output; None: its item has not begun.
        written: Arguments or input so far.
        pending: Pieces of it that were not written yet.
    """

    def __init__(self) -> None:
        self.id = ""
        self.call_id = ""
        self.name = ""
        self.index: int | None = None
        self.is_custom = False
        self.is_closed = False
        self.written = ""
        self.pending: list[str] = []
        self.extra_content: Any = UNSET

    @property
    def event(self) -> str:
        """Beginning of the names of its events."""
        return "response.custom_tool_call_input" if self.is_custom else "response.function_call_arguments"

    @property
    def is_whole(self) -> bool:
        """Whether its arguments so far are a whole JSON object."""
        return not self.is_custom and is_json_object(self.written + "".join(self.pending))

    def is_function_for(self, custom_tools: frozenset[str]) -> bool:
        """Whether the model called one of these tools as a function."""
        return not self.is_custom and self.name in custom_tools

    def add(self, piece: Mapping[str, Any]) -> None:
        """Adds a piece of the call."""
        self.is_custom = self.is_custom or piece.get("type") == "custom" or "custom" in piece
        body = piece.get("custom" if self.is_custom else "function") or {}
        self.call_id = self.call_id or piece.get("id") or ""
        self.name += body.get("name") or ""
        if text := body.get("input" if self.is_custom else "arguments"):
            self.pending.append(text)
        if piece.get("extra_content") is not None:
            self.extra_content = piece["extra_content"]

    def take(self) -> str:
        """Returns what was not written yet, which is written now."""
        text = "".join(self.pending)
        self.written += text
        self.pending.clear()
        return text

    def become_custom(self) -> None:
        """Makes of a function with one text the call of a tool whose input is that text."""
        arguments = self.written + "".join(self.pending)
        self.is_custom, self.written = True, ""
        try:
            text = msgspec.json.decode(arguments, type=dict[str, str])["input"]
        except (msgspec.MsgspecError, KeyError, UnicodeError, RecursionError):
            text = arguments
        self.pending = [text]

    def item(self, status: ItemStatus) -> OutputFunctionCall | OutputCustomCall:
        """Returns the item in its current state."""
        if self.is_custom:
            return OutputCustomCall(id=self.id, call_id=self.call_id, name=self.name, input=self.written, status=status)
        return OutputFunctionCall(
            id=self.id,
            call_id=self.call_id,
            name=self.name,
            arguments=self.written,
            status=status,
            extra_content=self.extra_content,
        )


def _text_delta_form() -> JsonTemplate:
    """Returns the template of an event that has nothing but a text."""
    event = ResponseEvent(
        type="response.output_text.delta",
        sequence_number=1001,
        item_id="an id",
        output_index=1002,
        content_index=1003,
        delta="a text",
        logprobs=[],
    )
    return JsonTemplate(encode_response_event(event), (b"1001", b'"an id"', b"1002", b"1003", b'"a text"'))


_TEXT_DELTA = _text_delta_form()
