"""Parser of OpenAI's event streams, which also detects incomplete responses. It does no I/O: bytes in, deltas out.

Servers abort streams in many ways, and most of them look like a regular end. So a response is complete only if it has a
finish reason for every choice and then ``[DONE]``, or the end of a body whose length its framing tells, or the usage
and the end of the connection. A failure is whatever may have lost a part of the answer: an event that cannot be read,
an error event, text, calls or thoughts after the finish reason of a choice, an unknown choice, more chunks than tokens
(duplicates), or any other end.

Everything else that a server sends is read leniently, and passed on in its own words: members that the gateway does not
decide stand in `TextDelta.extra` and `TextDelta.metadata`. Events that say nothing are skipped, and a body that is one
whole answer in place of a stream is read too.

Most chunks of a stream differ in their text alone. What stands before and behind the text of such a chunk is kept, and
the next chunk with the same bytes there needs nothing but the decoding of its text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from maitred.core.inference import ChunkMetadata, TextDelta
from maitred.core.request import FinishReason, Usage
from maitred.core.text_replica import TextBatch
from maitred.replica.upstream.chunk import (
    MessageParts,
    PlainChunk,
    decode_plain_chunk,
    decode_text,
    parse_index,
    parse_scores,
    split_at_text,
    strip_padding,
)
from maitred.replica.upstream.dialects import UpstreamDialect
from maitred.replica.upstream.errors import (
    ReportedError,
    make_replica_lost,
    make_stream_error,
    parse_error,
    parse_error_in_place,
)
from maitred.replica.upstream.whole_body import WholeBody
from maitred.wire.answer_event import (
    AnswerBroken,
    TextAssembler,
    decode_event,
    parse_finish_reason,
    replace_surrogates,
)
from maitred.wire.openai.responses import TEXT_FIELDS
from maitred.wire.openai.tool_calls import ToolCallAssembler, ToolCallState
from maitred.wire.openai.written import merge_metadata
from maitred.wire.reported_usage import is_empty, read_usage
from maitred.wire.sse import SSESplitter

_DECIDED_BY_GATEWAY = frozenset({"id", "object", "created", "model", "choices", "usage", "obfuscation", "error"})
"""Members of a chunk that are not passed on. `obfuscation` hides the length of a chunk on one connection."""
_READ_OF_CHOICE = frozenset({"index", "delta", "message", "text", "finish_reason", "logprobs", "usage"})
_READ_OF_LOGPROBS = frozenset({"content", "tokens", "token_logprobs", "top_logprobs", "text_offset"})
_READ_OF_DELTA = frozenset({"role", "content", "tool_calls", "function_call", *TEXT_FIELDS})
_ANSWER_FIELDS = frozenset({"tool_calls", *TEXT_FIELDS})
"""Members of a delta that are, like its text, the answer of the model."""
_NO_TEMPLATE = b"\0", b""
"""Bytes that no event begins with."""
_NO_METADATA = ChunkMetadata()


class OpenAIStreamParser:
    """Parser of one stream of OpenAI's API. Implements `StreamParser` of `maitred.replica.upstream.stream`.

    Args:
        server: Name of the server, for log messages.
        choice_count: Number of requested choices, of all prompts together.
        dialect: Dialect of the server.
        choices_per_prompt: Number of choices of each prompt (`n`).
        request_body: Body of the request, to tell the caller's words from the server's.

    Attributes:
        has_begun: Whether any part of the response was received; a role alone does not count.
        is_complete: Whether the whole response was received.
    """

    def __init__(
        self,
        server: str,
        choice_count: int,
        dialect: UpstreamDialect,
        choices_per_prompt: int = 1,
        request_body: bytes | None = None,
    ) -> None:
        self.has_begun = False
        self.is_complete = False
        self._server_name = server
        self._request_body = request_body
        self._error_in_place: ReportedError | None = None
        """What an object that is no chunk says of an error, before the answer."""
        self._dialect = dialect
        self._splitter = SSESplitter()
        self._finish_reasons: dict[int, FinishReason] = {}
        self._choice_count = choice_count
        self._choices_per_prompt = choices_per_prompt
        self._only_index: object = None
        """Index by which the server calls the only choice; None: not known yet."""
        self._text_offsets = [0] * choice_count
        self._chunk_count = 0
        self._usage: Usage | None = None
        """Usage that no batch has taken yet."""
        self._has_usage = False
        self._choice_usages: list[Usage] = []
        """Usages of the single choices, in a dialect with `has_usage_per_choice`."""
        self._body = WholeBody()
        self._before_text, self._behind_text = _NO_TEMPLATE
        self._text_place = slice(0)
        """Place of the text between the two."""
        self._text_member = ""
        """Member of a delta whose text stands between the two; empty: the content."""
        self._written_call: ToolCallState | None = None
        """Tool call whose arguments that text is; None: it is no call's."""
        self._is_padded = False
        """Whether chunks have a padding of changing length, which stays here."""
        self._is_plain_likely = choice_count == 1
        """Whether the next chunk may be a `PlainChunk`, as the last one was, and would then say no more than it has."""
        self._metadata: dict[int, ChunkMetadata] = {}
        """Members around the deltas of each choice, as of its last delta."""
        self._held_metadata: dict[int, ChunkMetadata] = {}
        """Members that came before the first part of the answer."""
        self._assemblers: dict[int, ToolCallAssembler] = {}
        self._thoughtful: set[int] = set()
        """Choices with a thought or a refusal."""
        self._characters = TextAssembler()
        """Joins characters whose parts come in two chunks, by choice and member."""

    def feed(self, data: bytes) -> TextBatch | None:
        """Parses data and returns a batch of new deltas; None if there are none.

        Before the first delta it returns None even if there is a usage, because a usage alone is no output.

        Raises:
            ReplicaLost: The response is invalid or incomplete.
            MaitredError: The stream begins with an error event; see `errors`.
        """
        events = self._splitter.feed(data)
        if len(events) == 1 and (texts := self._read_texts(events, 0)):
            usage, self._usage = self._usage, None
            return TextBatch([self._make_text_delta(texts[0])], usage, 1)
        if not events:
            self._on_partial_event(data)
            return self._take_batch([], 0) if self.is_complete else None
        self._body.on_events()
        return self._parse_events(events)

    def on_end(self, *, is_framed: bool) -> TextBatch | None:
        """Handles the end of the HTTP body; returns the deltas that were held back for it.

        Args:
            is_framed: Whether the framing of the body says that this is its end, not just the end of the connection.

        Raises:
            ReplicaLost: The response is incomplete.
            MaitredError: The body is an error.
        """
        if self.is_complete:
            return None
        # The event stream standard drops an event without its blank line, but one that can be read is whole.
        body = self._body.value
        events = self._splitter.feed(b"\n\n") if body is None else [bytes(body)]
        batch = self._parse_events(events)
        if not self.is_complete and self._has_finished and (is_framed or self._has_usage or body is not None):
            self.is_complete = True
            batch = None if batch is None else TextBatch(batch.parts, batch.usage, batch.chunks, whole=True)
        if not self.is_complete:
            self._raise_error_in_place()
            if not self.has_begun and body is None and self._body.unfinished_bytes:
                raise make_replica_lost("it was asked for a stream of events and sent something else")
            raise make_replica_lost("the body ended before [DONE]" if self.has_begun else "the body was empty")
        return batch

    # --- events ---

    def _read_texts(self, events: Sequence[bytes], start: int) -> list[str]:
        """Reads the texts of events, from this one on, that differ from the last one in their text alone.

        It ends before the first other event, and reads most events of most streams.
        """
        before, behind, place = self._before_text, self._behind_text, self._text_place
        head, tail = slice(len(before)), slice(-len(behind), None)
        call, is_padded = self._written_call, self._is_padded
        texts: list[str] = []
        try:
            for number in range(start, len(events)):
                event = strip_padding(events[number]) if is_padded else events[number]
                if event[head] != before or event[tail] != behind:  # faster than `startswith` and `endswith`
                    break
                text: str = decode_text(event[place])
                if not text or (call is not None and not self._write_call(call, text)):
                    break
                texts.append(text)
        except (msgspec.MsgspecError, UnicodeError):
            pass  # it has no text there
        if texts:
            self._chunk_count += len(texts)
            if not self._text_member:
                self._text_offsets[0] += len("".join(texts))
        return texts

    @staticmethod
    def _write_call(call: ToolCallState, text: str) -> bool:
        """Adds arguments to a call; returns False if they may mean something else."""
        if call.written.endswith("}"):
            return False  # the call may be whole
        call.written += text
        return True

    def _make_text_delta(self, text: str) -> TextDelta:
        """Makes a delta of the text that the template is of: of the content, of a thought, or of a call."""
        if not self._text_member:
            return TextDelta(0, text)
        call = self._written_call
        if call is None:
            return TextDelta(0, "", extra={self._text_member: text})
        return TextDelta(0, "", extra={"tool_calls": [{"index": call.number, "function": {"arguments": text}}]})

    def _parse_events(self, events: Sequence[bytes]) -> TextBatch | None:
        """Parses events; merges consecutive text of a single choice into one delta."""
        deltas: list[TextDelta] = []
        chunks_before = self._chunk_count
        number, first_text = 0, ""
        while True:
            texts = self._read_texts(events, number) if self._behind_text else []
            if texts or first_text:
                number += len(texts)
                deltas.append(self._make_text_delta(first_text + "".join(texts)))
                first_text = ""
            if number == len(events) or self.is_complete:
                break
            before = len(deltas)
            self._parse_event(events[number].strip(), deltas)
            number += 1
            if len(deltas) == before + 1 and self._choice_count == 1 and not self._text_member and deltas[-1].plain:
                first_text = deltas.pop().text
        return self._take_batch(deltas, self._chunk_count - chunks_before)

    def _take_batch(self, deltas: list[TextDelta], chunks: int) -> TextBatch | None:
        """Returns a batch of these deltas with the usage that no batch has taken yet; None if there is neither."""
        if not self.has_begun or not (deltas or self._usage is not None):
            return None
        usage, self._usage = self._usage, None
        return TextBatch(deltas, usage, chunks, self.is_complete)

    def _on_partial_event(self, data: bytes) -> None:
        """Handles data that completes no event."""
        is_done = self._has_finished and data.rstrip(b"\r\n").endswith((b"data: [DONE]", b"data:[DONE]"))
        if not self._body.add(data) and is_done:
            self.is_complete = True  # it has no unfinished form, so its blank line need not come

    def _parse_event(self, event: bytes, deltas: list[TextDelta]) -> None:
        """Parses one event of any kind and appends its deltas."""
        if event == b"[DONE]":
            self._on_done()
            return
        if self._is_plain_likely:
            try:
                chunk = decode_plain_chunk(event)
            except (msgspec.MsgspecError, UnicodeError, RecursionError):
                self._is_plain_likely = False
            else:
                self._read_plain_chunk(chunk, deltas, event)
                return
        try:
            value, is_mended = decode_event(event)
        except AnswerBroken as failure:
            raise make_replica_lost(str(failure)) from None
        for fields in value if isinstance(value, list) else (value,):
            if isinstance(fields, dict):
                if is_mended:
                    fields = {
                        name: entry if name == "choices" else replace_surrogates(entry)
                        for name, entry in fields.items()
                    }
                self._read_chunk(fields, deltas, event, is_mended=is_mended)

    def _on_done(self) -> None:
        """Handles ``[DONE]``; raises ReplicaLost if a choice is unfinished."""
        if not self._has_finished:
            self._raise_error_in_place()
            unfinished = self._choice_count - len(self._finish_reasons)
            raise make_replica_lost(f"it ended with {unfinished} of {self._choice_count} choices unfinished")
        self.is_complete = True

    @property
    def _has_finished(self) -> bool:
        """Whether every choice has its finish reason."""
        return len(self._finish_reasons) == self._choice_count

    # --- chunks ---

    @property
    def _may_be_plain(self) -> bool:
        """Whether a `PlainChunk` says no more than it has: nothing was held back, and no member has to be told anew."""
        return not (
            self._only_index
            or self._metadata
            or self._held_metadata
            or self._assemblers
            or self._characters.held
            or self._text_member
        )

    def _read_plain_chunk(self, chunk: PlainChunk, deltas: list[TextDelta], event: bytes) -> None:
        """Reads a chunk of the only choice as `_read_chunk` does, which has less to look for."""
        for choice in chunk.choices:
            if choice.index is not None:
                self._only_index = 0
            text = choice.delta.content or ""
            finish = None
            if choice.finish_reason or self._finish_reasons:
                finish = self._read_finish(0, choice.finish_reason, {}, goes_on=bool(text))
            if text or finish is not None:
                self.has_begun = True
                self._text_offsets[0] += len(text)
                self._chunk_count += bool(text)
                deltas.append(TextDelta(0, text, finish))
                if finish is None and not chunk.usage:
                    self._keep_template_of("content", text, event)
        if chunk.usage and (usage := read_usage(chunk.usage)) is not None:
            self._keep_usage(usage, choices=len(chunk.choices))

    def _read_chunk(self, fields: Mapping[str, Any], deltas: list[TextDelta], event: bytes, *, is_mended: bool) -> None:
        """Reads a chunk or a whole answer: appends its deltas and keeps its usage."""
        choices = fields.get("choices")
        if fields.get("error") or choices is None:
            self._raise_reported_error(fields)
            if choices is None and fields.get("usage") is None:
                if not self.has_begun:
                    self._error_in_place = parse_error_in_place(fields)
                return  # an event of another kind
        if isinstance(choices, dict):
            choices = [choices]
        if not isinstance(choices, list | None):
            raise make_replica_lost("it sent an event that is no chunk of an answer")
        members = {
            name: value for name, value in fields.items() if name not in _DECIDED_BY_GATEWAY and not is_empty(value)
        }
        before, has_held = len(deltas), bool(self._held_metadata)
        choices = [choice for choice in choices or () if choice is not None]
        for choice in choices:
            self._read_choice(choice, members, deltas, is_mended=is_mended)
        if not choices and members:
            self._append_delta(TextDelta(0, ""), ChunkMetadata(members, self._choice_members(0)), deltas)
        reported = fields.get("usage") or _usage_elsewhere(fields, choices)
        if reported is not None and (usage := read_usage(reported)) is not None:
            self._keep_usage(usage, choices=len(choices))
        elif self._choice_count == len(choices) == 1 and len(deltas) == before + 1 and not (is_mended or has_held):
            self._is_padded = "obfuscation" in fields
            self._keep_template(event, deltas[-1], choices)
        self._is_plain_likely = (
            self._choice_count == 1 and len(deltas) == before + 1 and deltas[-1].plain and self._may_be_plain
        )

    def _keep_template(self, event: bytes, delta: TextDelta, choices: Any) -> None:  # noqa: ANN401 - whatever JSON can be
        """Keeps the bytes around the text of a chunk that has only one text: of its content, a thought or a call."""
        self._drop_template()
        if delta.finish is not None or delta.scores is not None or self._characters.held:
            return
        if delta.metadata is not None and _speaks_of_tokens(delta.metadata):
            return  # equal members of two chunks are those of two tokens
        call: ToolCallState | None = None
        match delta:
            case TextDelta(text=text, extra=None):
                member = "text" if choices[0].get("text") else "content"
            case TextDelta(text="", extra={"tool_calls": [{"function": {"arguments": text, **body}, **piece}], **rest}):
                if body or rest or piece.keys() != {"index"}:
                    return
                member, call = "arguments", self._assemblers[0].latest
            case TextDelta(text="", extra=dict(extra)) if len(extra) == 1 and not extra.keys().isdisjoint(TEXT_FIELDS):
                ((member, text),) = extra.items()
            case _:
                return
        if self._keep_template_of(member, text, strip_padding(event) if self._is_padded else event):
            self._text_member, self._written_call = member if delta.extra else "", call

    def _keep_template_of(self, member: str, text: str, event: bytes) -> bool:
        """Keeps the bytes around the text of this member of a chunk; returns False if its place is not certain."""
        template = split_at_text(event, member.encode(), text) if text else None
        if template is None:
            return False
        self._before_text, self._behind_text = template
        self._text_place = slice(len(template[0]), -len(template[1]))
        return True

    def _drop_template(self) -> None:
        self._before_text, self._behind_text = _NO_TEMPLATE
        self._text_member, self._written_call = "", None

    def _read_choice(
        self,
        choice: object,
        members: dict[str, Any],
        deltas: list[TextDelta],
        *,
        is_mended: bool,
    ) -> None:
        """Reads the addition of a chunk to one choice."""
        if not isinstance(choice, dict):
            raise make_replica_lost("it sent an event that is no chunk of an answer")
        if choice.get("error"):
            self._raise_reported_error(choice)
        index = self._index_of(choice.get("index"))
        if is_mended or self._characters.held:
            choice = self._join_characters(index, choice)
        text, extra = self._read_delta(index, choice)
        others = {name: value for name, value in choice.items() if name not in _READ_OF_CHOICE and not is_empty(value)}
        logprobs = choice.get("logprobs")
        scores = parse_scores(logprobs, self._text_offsets[index]) if logprobs else None
        if isinstance(logprobs, dict):
            # Those of a refusal, and those that only the client may be able to read
            unread = {
                name: value
                for name, value in logprobs.items()
                if not is_empty(value) and (scores is None or name not in _READ_OF_LOGPROBS)
            }
            if unread:
                others["logprobs"] = unread
        has_answer = bool(text) or not extra.keys().isdisjoint(_ANSWER_FIELDS)
        if extra and not extra.keys().isdisjoint(TEXT_FIELDS):
            self._thoughtful.add(index)
        finish = self._read_finish(index, choice.get("finish_reason"), extra, goes_on=has_answer)
        if finish is not None and self._characters.held and self._is_cut(index):
            text += "\ufffd"
        self._text_offsets[index] += len(text)
        self._chunk_count += has_answer
        stop = None
        if finish is FinishReason.STOP:
            # What ended the choice, in vLLM and SGLang: a stop string, or the number of a stop token.
            words = choice.get("stop_reason"), choice.get("matched_stop")
            stop = next((word for word in words if isinstance(word, str)), None)
        delta = TextDelta(index, text, finish, scores=scores, extra=extra or None, stop=stop)
        self._append_delta(delta, ChunkMetadata(members, others) if members or others else _NO_METADATA, deltas)

    def _append_delta(self, delta: TextDelta, metadata: ChunkMetadata, deltas: list[TextDelta]) -> None:
        """Appends a delta with the members around it, if they have changed; holds them back before the answer."""
        index = delta.index
        says_something = bool(delta.text or delta.scores) or delta.extra is not None or delta.finish is not None
        if not says_something and not self.has_begun:
            if metadata != _NO_METADATA:
                self._held_metadata[index] = self._with_held(index, metadata)
            return
        if index in self._held_metadata:
            metadata = self._with_held(index, metadata)
            del self._held_metadata[index]
        changes = metadata != self._metadata.get(index, _NO_METADATA) or _speaks_of_tokens(metadata)
        if changes and (says_something or metadata != _NO_METADATA):
            self._metadata[index] = metadata
            self._drop_template()
            delta = msgspec.structs.replace(delta, metadata=metadata)
        elif not says_something:
            return
        self.has_begun = True
        deltas.append(delta)

    def _with_held(self, index: int, metadata: ChunkMetadata) -> ChunkMetadata:
        """Returns members with those that came before the answer; of tokens they go on."""
        held = self._held_metadata.get(index, _NO_METADATA)
        return ChunkMetadata({**held.chunk, **metadata.chunk}, merge_metadata((held.choice, metadata.choice)))

    def _choice_members(self, index: int) -> dict[str, Any]:
        return self._metadata.get(index, _NO_METADATA).choice

    def _index_of(self, index: object) -> int:
        """Returns the number of a choice; the only one may have any, as long as it keeps it."""
        if self._choice_count == 1:
            if self._only_index is None:
                self._only_index = index
            if index is None or index == self._only_index:
                return 0
        else:
            number = 0 if index is None else parse_index(index)
            if number is not None and 0 <= number < self._choice_count:
                return number
        raise make_replica_lost(f"it sent a choice {str(index)[:20]} of {self._choice_count}")

    def _read_delta(self, index: int, choice: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Returns the text of a choice's delta and its other members."""
        delta, message = choice.get("delta"), choice.get("message")
        has_text = bool(choice.get("text") or self._text_offsets[index] or index in self._assemblers)
        if message is not None and not delta and not has_text:
            delta = message  # a whole answer; what was thought before it is in it once more
            if index in self._thoughtful and isinstance(message, dict):
                delta = {name: value for name, value in message.items() if name not in TEXT_FIELDS}
        if is_empty(delta):
            delta = {}
        if not isinstance(delta, dict):
            raise make_replica_lost("it sent a delta that is no object")
        content = choice.get("text") or delta.get("content")
        extra: dict[str, Any] = {}
        text = content if isinstance(content, str) else "" if content is None else self._read_parts(content, extra)
        if delta:
            self._read_members(index, delta, extra)
        return text, extra

    @staticmethod
    def _read_parts(content: object, extra: dict[str, Any]) -> str:
        """Returns the text of a content of parts, and adds what else it has to the other members."""
        parts = MessageParts()
        parts.add(content)
        named = {
            "reasoning_content": parts.thought,
            "refusal": parts.refusal,
            "images": parts.images,
            "content_parts": parts.others,
        }
        extra |= {name: value for name, value in named.items() if value}
        return parts.text

    @staticmethod
    def _read_text_parts(value: object, extra: dict[str, Any]) -> str:
        """Returns the text of a thought or a refusal of parts, and adds what else it has to the other members."""
        parts = MessageParts()
        parts.add(value)
        for name, entries in (("images", parts.images), ("content_parts", parts.others)):
            if entries:
                _add_entries(extra, name, entries)
        return parts.all_text

    def _read_members(self, index: int, delta: Mapping[str, Any], extra: dict[str, Any]) -> None:
        """Adds the members of a delta beside its content."""
        for name, value in delta.items():
            if is_empty(value):
                continue
            if name not in _READ_OF_DELTA:
                _add_entries(extra, name, value)
            elif name in TEXT_FIELDS:
                text = value if isinstance(value, str) else self._read_text_parts(value, extra)
                if text:
                    extra[name] = extra.get(name, "") + text
        pieces = delta.get("tool_calls")
        if is_empty(pieces):
            # The name and the arguments of the old API's only call
            function = delta.get("function_call")
            pieces = None if is_empty(function) else [{"index": "function_call", "function": function}]
        if pieces and (calls := self._add_calls(index, pieces)):
            extra["tool_calls"] = calls

    def _add_calls(self, index: int, pieces: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - whatever JSON can be
        """Returns the pieces of tool calls with the numbers of their calls."""
        pieces = [piece for piece in (pieces if isinstance(pieces, list) else [pieces]) if piece is not None]
        for piece in pieces:
            bodies = [piece.get(name) for name in ("function", "custom")] if isinstance(piece, dict) else [piece]
            if not all(isinstance(body, dict | None) for body in bodies):
                raise make_replica_lost("it sent a delta whose members have other types than OpenAI's")
        assembler = self._assemblers.get(index)
        if assembler is None:
            assembler = self._assemblers[index] = ToolCallAssembler()
        if self._written_call is not None:
            self._drop_template()  # arguments alone may now be those of another call
        return assembler.add(pieces)

    def _read_finish(self, index: int, reason: object, extra: dict[str, Any], *, goes_on: bool) -> FinishReason | None:
        """Returns the finish reason of a choice if it is new, and completes its calls.

        Args:
            index: The choice.
            reason: Its `finish_reason`.
            extra: Members of its delta; gets what its calls lack.
            goes_on: Whether the chunk has text, calls or thoughts of the choice.
        """
        earlier = self._finish_reasons.get(index)
        if earlier is not None and goes_on:
            raise make_replica_lost(f"choice {index} went on after its end")
        if not reason:
            return None
        assembler = self._assemblers.get(index)
        try:
            finish = parse_finish_reason(reason, has_calls=assembler is not None and bool(assembler.calls))
        except AnswerBroken as failure:
            raise make_replica_lost(str(failure)) from None
        if finish is None or (earlier is not None and finish in (earlier, FinishReason.STOP, FinishReason.TOOL_CALLS)):
            return None
        self._finish_reasons[index] = finish
        self._drop_template()
        if assembler is not None:
            is_cut = finish not in (FinishReason.STOP, FinishReason.TOOL_CALLS)
            if lacking := assembler.close(is_cut=is_cut):
                extra["tool_calls"] = [*extra.get("tool_calls", ()), *lacking]
        return finish

    # --- cut characters ---

    def _join_characters(self, index: int, choice: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a choice whose texts go on with the parts of characters that the chunks before ended with."""
        joined = {
            name: self._characters.join((index, name), value)
            if name in ("delta", "message", "text")
            else replace_surrogates(value)
            for name, value in choice.items()
        }
        if self._characters.held:
            self._drop_template()
        return joined

    def _is_cut(self, index: int) -> bool:
        """Forgets the parts of characters of a choice that has ended; returns whether its text ends with one."""
        return any(place[-1] in ("text", "content") for place in self._characters.take(index))

    # --- usage and errors ---

    def _keep_usage(self, usage: Usage, *, choices: int) -> None:
        """Keeps a reported usage for the next batch; see `_total_usage`."""
        if self._has_usage and not (usage.prompt_tokens or usage.completion_tokens):
            return  # zeros behind the counts
        self._usage = self._total_usage(usage, choices=choices) or self._usage

    def _total_usage(self, usage: Usage, *, choices: int) -> Usage | None:
        """Returns the usage of the whole response; None if the reported usage covers only one choice.

        Args:
            usage: The reported usage.
            choices: Number of choices in its chunk. Where these are some of several, the usage is only of those.
        """
        if self._choice_count in (1, choices):
            pass
        elif self._dialect.has_usage_per_choice:
            self._choice_usages.append(usage)
            if len(self._choice_usages) < self._choice_count:
                return None
            usage = _merge_usages(self._choice_usages, self._choices_per_prompt)
        elif choices:
            return None
        # A parser of tool calls can make several chunks of one token.
        if (
            self._dialect.has_token_per_chunk
            and not self._assemblers
            and 0 < usage.completion_tokens < self._chunk_count
        ):
            raise make_replica_lost(
                f"{self._chunk_count} chunks have {usage.completion_tokens} tokens: some came twice"
            )
        self._has_usage = True
        return usage

    def _raise_reported_error(self, fields: Mapping[str, Any]) -> None:
        """Raises an exception if the event is an error event."""
        error = parse_error(fields)
        if error is not None:
            raise make_stream_error(self._server_name, error, self._request_body, has_begun=self.has_begun)

    def _raise_error_in_place(self) -> None:
        """Raises the error that came in the form of no known API, if nothing else came."""
        if self._error_in_place is not None and not self.has_begun:
            raise make_stream_error(self._server_name, self._error_in_place, self._request_body, has_begun=False)


def _add_entries(extra: dict[str, Any], name: str, value: Any) -> None:  # noqa: ANN401 - whatever the server sent
    """Adds a member of a delta; lists of one member are joined, and beside a list anything else says nothing."""
    before = extra.get(name)
    if isinstance(before, list):
        extra[name] = [*before, *value] if isinstance(value, list) else before
    else:
        extra[name] = value


def _usage_elsewhere(fields: Mapping[str, Any], choices: Sequence[Any]) -> object:
    """Returns the usage that does not stand at the top of a chunk: in a choice, at Groq, or by Google's name."""
    for place in (*choices, fields.get("x_groq")):
        if isinstance(place, dict) and place.get("usage"):
            return place["usage"]
    return fields.get("usageMetadata") or fields.get("usage_metadata")


def _speaks_of_tokens(metadata: ChunkMetadata) -> bool:
    """Returns whether members of a choice are about the tokens of one chunk alone, such as their ids."""
    return any(
        name == "logprobs" or (isinstance(value, list) and isinstance(value[0], int))
        for name, value in metadata.choice.items()
    )


def _merge_usages(usages: Sequence[Usage], choices_per_prompt: int) -> Usage:
    """Merges the usages of all choices; each prompt is counted once, not once per choice.

    The cached tokens are the prompt tokens that were not computed for any choice.
    """
    prompt_tokens = sum(usage.prompt_tokens for usage in usages) // choices_per_prompt
    computed_tokens = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
    return Usage(
        prompt_tokens,
        sum(usage.completion_tokens for usage in usages),
        max(0, prompt_tokens - computed_tokens),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )
