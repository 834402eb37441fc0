"""Recorder of a response: notes the time of every piece of text, the server's usage, and the outcome."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from maitred.load.measure.record import RequestRecord, UserOutcome
from maitred.load.play.client.refrain import EventFrame
from maitred.wire.sse import SSESplitter

_LONGEST_QUOTE = 300


class _Text(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Text | None = None
    message: _Text | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class StreamTotals:
    """Totals over all streams, for the live display."""

    pieces: int = 0


class StreamRecorder:
    """A `ResponseReader` that fills a record.

    Args:
        record: Record of the request; values of this attempt replace those of the attempt before.
        traffic: Totals that are increased.
        keep_text: Whether to keep the text, for the next turn or for the caller of the run.

    Attributes:
        headers: Headers of the response; empty until they have arrived.
        text: Pieces of the text, if they are kept.
        failure: Fault of the answer itself; empty: none so far.
        when_begun: Callback for the arrival of the response's head.
    """

    __slots__ = (
        "_add",
        "_cutter",
        "_done",
        "_keep_text",
        "_record",
        "_refrain",
        "_traffic",
        "_whole",
        "failure",
        "headers",
        "text",
        "when_begun",
    )

    def __init__(self, record: RequestRecord, traffic: StreamTotals, *, keep_text: bool) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.text: list[str] = []
        self.failure = ""
        self.when_begun: Callable[[], object] | None = None
        self._record = record
        self._traffic = traffic
        self._keep_text = keep_text
        self._cutter: SSESplitter | None = None
        self._refrain = EventFrame()
        self._whole = bytearray()
        self._done = False
        self._add = record.arrivals_s.append

    def head(self, status: int, headers: dict[bytes, bytes], now_s: float) -> None:
        """Takes the head of the response; implements `ResponseReader.head`."""
        self.headers = headers
        self._record.status = status
        self._record.headers_s = now_s
        if status == 200 and headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            self._cutter = SSESplitter()
        if self.when_begun is not None:
            self.when_begun()

    def body(self, data: bytes, now_s: float) -> None:
        """Takes bytes of the body; implements `ResponseReader.body`."""
        cutter = self._cutter
        if cutter is None:
            self._whole += data
            return
        if self._refrain.repeats(data) and cutter.idle and not self._keep_text:
            self._add(now_s)
            self._traffic.pieces += 1
            return
        for event in cutter.feed(data):
            if event == b"[DONE]":
                self._done = True
                continue
            try:
                chunk = _chunk(event)
            except msgspec.MsgspecError:
                self.failure = f"An event is no chunk of an answer: {quote(event)}"
                continue
            for choice in chunk.choices:
                piece = choice.delta
                text = choice.text if piece is None else piece.content or piece.reasoning_content or piece.reasoning
                if text or (piece is not None and piece.tool_calls):
                    self._add(now_s)
                    self._traffic.pieces += 1
                    if self._keep_text and text:
                        self.text.append(text)
                    elif text and _is_text_alone(chunk):
                        self._refrain.learn(event, text)
                if choice.finish_reason:
                    self._record.finish_reason = choice.finish_reason
            if chunk.usage is not None:
                self._count(chunk.usage)
            if chunk.error is not None:
                self.failure = error_message(event)

    def outcome(self) -> tuple[UserOutcome, str]:
        """Returns the outcome of the ended response, and the reason if it is not complete."""
        if self._record.status >= 500:
            return UserOutcome.FAILED, f"HTTP {self._record.status}: {error_message(bytes(self._whole))}"
        if self._record.status != 200:
            return UserOutcome.REFUSED, f"HTTP {self._record.status}: {error_message(bytes(self._whole))}"
        if self._cutter is None:
            return self._read_whole()
        if self.failure:
            return UserOutcome.CUT, self.failure
        if not self._done:
            return UserOutcome.CUT, "The stream ended without [DONE]."
        if not self._record.finish_reason:
            return UserOutcome.CUT, "The stream ended without a finish reason."
        return UserOutcome.COMPLETE, ""

    def _read_whole(self) -> tuple[UserOutcome, str]:
        """Reads an answer that was not streamed."""
        try:
            answer = _chunk(self._whole)
        except msgspec.MsgspecError:
            return UserOutcome.CUT, f"The response is no answer: {quote(bytes(self._whole))}"
        if not answer.choices:
            return UserOutcome.CUT, f"The response has no answer in it: {quote(bytes(self._whole))}"
        choice = answer.choices[0]
        text = choice.text if choice.message is None else choice.message.content
        if self._keep_text and text:
            self.text.append(text)
        self._record.finish_reason = choice.finish_reason or ""
        if answer.usage is not None:
            self._count(answer.usage)
        if not self._record.finish_reason:
            return UserOutcome.CUT, "The answer has no finish reason."
        return UserOutcome.COMPLETE, ""

    def _count(self, usage: _Usage) -> None:
        self._record.prompt_tokens = usage.prompt_tokens
        self._record.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self._record.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0


def _is_text_alone(chunk: _Chunk) -> bool:
    """Whether an event holds only a piece of text."""
    return len(chunk.choices) == 1 and not chunk.choices[0].finish_reason and chunk.usage is None and not chunk.error


def error_message(body: bytes) -> str:
    """Returns the message of an API error in any of the usual forms; else the shortened body."""
    try:
        document = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return quote(body)
    for path in (("error", "message"), ("message",), ("error",), ("detail",)):
        value = document
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, str):
            return quote(value.encode())
    return quote(body)


def quote(data: bytes) -> str:
    """Formats a server's text as one short line without control characters."""
    text = data.decode(errors="replace")
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _LONGEST_QUOTE else line[:_LONGEST_QUOTE] + "…"
