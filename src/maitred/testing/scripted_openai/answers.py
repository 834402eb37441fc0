"""Answers from requests and the script: the bytes and the gaps. Pure: no clock, no socket.

The text of an answer is ``0 1 2 3 …``, one number per token, so a client can check that nothing is missing. The events
of plain streams are made once and shared by all requests; only the last send of each stream is individual.
"""

import random
from dataclasses import dataclass, field
from itertools import cycle, islice

import msgspec

from maitred.testing.scripted_openai.odd_stream import OddStream, StreamEnding, TimedSend, error_object
from maitred.testing.scripted_openai.questions import KNOWN_FIELDS, Question
from maitred.testing.scripted_openai.script import FaultKind, ScriptedFault, ServerScript
from maitred.wire.sse import DONE, encode_event

END_OF_BODY = b"0\r\n\r\n"
_question = msgspec.json.Decoder(Question)


@dataclass(slots=True)
class AnswerSchedule:
    """Schedule of an answer: the bytes to send, and their times.

    Attributes:
        head: Bytes that are sent when the processing of the request begins.
        sends: Bytes of each further send.
        gaps_s: Gap before each send, in seconds: from the head, or from the send before.
        events_per_send: Number of events that each send completes; None: one each.
        ending: Ending of the connection after the last send.
        end: Name of the ending in the log.
        takes_turn: Whether the request counts as one of the concurrent requests.
        shared: Shared list of all sends but the last, for all answers of this kind; None: nothing is shared.
    """

    head: bytes
    sends: list[bytes] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    events_per_send: list[int] | None = None
    ending: StreamEnding = StreamEnding.KEEP
    end: str = "complete"
    status: int = 200
    takes_turn: bool = True
    stream: bool = False
    user: str = ""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    shared: list[bytes] | None = None


class AnswerFactory:
    """Factory of the answers of one script.

    Args:
        script: Script of the answers.
        created: Unix time in the answers.
    """

    def __init__(self, script: ServerScript, created: int = 0) -> None:
        self._script = script
        self._created = created
        self._gaps_s = script.itl.table(random.Random(script.seed))
        self._chunks: dict[bool, list[bytes]] = {True: [], False: []}

    def models(self) -> bytes:
        """Returns the response to ``GET /v1/models``."""
        model = {"id": self._script.model, "object": "model", "created": self._created, "owned_by": "script"}
        return response(200, {"object": "list", "data": [model]})

    def answer(self, number: int, *, chat: bool, body: bytes, least_gap_s: float = 0.0) -> AnswerSchedule:
        """Makes the answer to one request.

        Args:
            number: Number of the request.
            chat: Whether it is a chat completion; otherwise a text completion.
            body: Body of the request in JSON.
            least_gap_s: Least time per event at the server's current capacity; for answers that are not streamed.
        """
        try:
            question, unreadable = _question.decode(body), ""
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            question, unreadable = Question(), f"The body is not a request: {error}."
        script = self._script
        rng = script.rng_of(number)
        faults = script.faults_of(number, rng, question.model)
        answer = _no_answer(faults[0]) if faults else None
        if answer is None and unreadable:
            answer = _refusal(400, unreadable)
        if answer is None and script.strict and (unknown := sorted(set(msgspec.json.decode(body)) - KNOWN_FIELDS)):
            answer = _refusal(400, f"Unrecognized request argument supplied: {unknown[0]}", param=unknown[0])
        if answer is None:
            answer = self._answer(question, faults, rng, chat=chat, least_gap_s=least_gap_s)
        answer.user = question.user or ""
        return answer

    def _answer(
        self, question: Question, faults: list[ScriptedFault], rng: random.Random, *, chat: bool, least_gap_s: float
    ) -> AnswerSchedule:
        """Makes an answer that begins normally."""
        script = self._script
        ttft_s = script.ttft.draw(rng)
        tokens = max(1, question.max_completion_tokens or question.max_tokens or script.default_tokens)
        events = -(-tokens // script.tokens_per_event)
        offset = rng.randrange(len(self._gaps_s))
        gaps_s = [ttft_s, *self._gaps_s[offset : offset + events - 1]]
        gaps_s += islice(cycle(self._gaps_s), events - len(gaps_s))
        prompt_tokens = question.words() + script.template_tokens
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": int(prompt_tokens * script.cached_share)},
        }
        if question.stream:
            options = question.stream_options
            counts = all(fault.kind is not FaultKind.NO_USAGE for fault in faults)
            asked = options is not None and options.include_usage
            closing = self._closing(chat, usage if asked and counts else None)
            answer = self._stream(chat, gaps_s, tokens, closing, faults, rng)
        else:
            seconds = ttft_s + sum(max(gap_s, least_gap_s) for gap_s in gaps_s[1:])
            answer = self._whole(chat, seconds, tokens, usage, faults)
        answer.prompt_tokens, answer.answer_tokens = prompt_tokens, tokens
        return answer

    # --- streams ---

    def _stream(
        self,
        chat: bool,
        gaps_s: list[float],
        tokens: int,
        closing: bytes,
        faults: list[ScriptedFault],
        rng: random.Random,
    ) -> AnswerSchedule:
        role = self._event(chat, {"role": "assistant", "content": ""}) if chat and self._script.early_role else b""
        if any(fault.kind is FaultKind.CRLF for fault in faults):
            role = role.replace(b"\n", b"\r\n")
        short = any(fault.kind is FaultKind.SHORT_LENGTH for fault in faults)
        framing, framed = ({"content-length": str(1 << 20)}, bytes) if short else (_CHUNKED, chunk)
        opening = head(200, "text/event-stream; charset=utf-8", framing) + framed(role)
        before_last = len(gaps_s) - 1
        last = self._text_event(chat, before_last, tokens)
        if not faults:
            end = chunk(last) + chunk(closing) + END_OF_BODY
            shared = self._pack_chunks(chat, before_last)
            return AnswerSchedule(opening, [*shared[:before_last], end], gaps_s, stream=True, shared=shared)
        events = [*(self._text_event(chat, index, tokens) for index in range(before_last)), last]
        odd = OddStream([TimedSend(gap_s, event, 1) for gap_s, event in zip(gaps_s, events, strict=True)], closing)
        for fault in faults:
            odd.apply(fault, rng)
        if odd.ends_body and not odd.sends:
            odd.sends.append(TimedSend(0.0, b"", 0))
        sends = [framed(send.data) for send in odd.sends]
        if odd.ends_body:
            sends[-1] += END_OF_BODY
        return AnswerSchedule(
            opening,
            sends,
            [send.gap_s for send in odd.sends],
            events_per_send=[send.events for send in odd.sends],
            ending=odd.ending,
            end=odd.end,
            stream=True,
        )

    def _pack_chunks(self, chat: bool, events: int) -> list[bytes]:
        """Packs events into chunks with at least this number of full events."""
        chunks = self._chunks[chat]
        for index in range(len(chunks), events):
            chunks.append(chunk(self._text_event(chat, index, (index + 1) * self._script.tokens_per_event)))
        return chunks

    def _text_event(self, chat: bool, index: int, tokens: int) -> bytes:
        """Returns an event by its index in an answer of this length."""
        first = index * self._script.tokens_per_event
        text = _count(first, min(first + self._script.tokens_per_event, tokens))
        return self._event(chat, {"content": text} if chat else text)

    def _closing(self, chat: bool, usage: object) -> bytes:
        """Returns the events that follow directly after the last text."""
        finish = self._event(chat, {} if chat else "", finish="length")
        usage_event = encode_event(msgspec.json.encode({**self._frame(chat), "choices": [], "usage": usage}))
        return finish + (usage_event if usage is not None else b"") + DONE

    def _event(self, chat: bool, content: object, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta" if chat else "text": content, "logprobs": None, "finish_reason": finish}
        return encode_event(msgspec.json.encode({**self._frame(chat), "choices": [choice]}))

    def _frame(self, chat: bool, *, whole: bool = False) -> dict[str, object]:
        kind = ("chat.completion" if whole else "chat.completion.chunk") if chat else "text_completion"
        name = "chatcmpl-scripted" if chat else "cmpl-scripted"
        return {"id": name, "object": kind, "created": self._created, "model": self._script.model}

    # --- answers in one piece ---

    def _whole(
        self, chat: bool, seconds: float, tokens: int, usage: object, faults: list[ScriptedFault]
    ) -> AnswerSchedule:
        text = _count(0, tokens)
        content: dict[str, object] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
        data = response(200, {**self._frame(chat, whole=True), "choices": [choice], "usage": usage})
        answer = AnswerSchedule(b"")
        for fault in faults:
            answer.end = fault.kind
            match fault.kind:
                case FaultKind.CUT | FaultKind.RESET:
                    data = data[:-10]
                    answer.ending = StreamEnding.RESET if fault.kind is FaultKind.RESET else StreamEnding.CLOSE
                case FaultKind.GARBAGE | FaultKind.ERROR_EVENT | FaultKind.NO_DONE:
                    data = head(200, "application/json", {"content-length": "5"}) + b"{oops"
                case FaultKind.STALL if fault.for_s is not None:
                    seconds += fault.for_s
                case FaultKind.STALL:
                    answer.ending = StreamEnding.STALL
                    return answer
                case _:  # the fault applies only to streams
                    answer.end = "complete"
        answer.sends, answer.gaps_s = [data], [seconds]
        return answer


def response(status: int, body: object, headers: dict[str, str] | None = None) -> bytes:
    """Makes a whole HTTP response with a JSON body."""
    data = msgspec.json.encode(body)
    return head(status, "application/json", {"content-length": str(len(data)), **(headers or {})}) + data


def head(status: int, content_type: str, headers: dict[str, str]) -> bytes:
    """Makes the status line and headers of a response."""
    lines = [f"HTTP/1.1 {status} Scripted", "server: maitred-scripted", f"content-type: {content_type}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()


def chunk(data: bytes) -> bytes:
    """Makes one chunk of a chunked body; an empty chunk would end it, so it is left out."""
    return b"%x\r\n%s\r\n" % (len(data), data) if data else b""


_CHUNKED = {"transfer-encoding": "chunked"}
_PAGE = b"<!doctype html><title>502 Bad Gateway</title><h1>Bad Gateway</h1>"
_SAID_200 = {
    FaultKind.HTML: head(200, "text/html", {"content-length": str(len(_PAGE))}) + _PAGE,
    FaultKind.EMPTY: head(200, "text/event-stream; charset=utf-8", {"content-length": "0"}),
    FaultKind.ERROR_BODY: response(200, error_object("The script wants an error here.", 500)),
}
"""Faults that send the status 200 without a valid answer."""


def _no_answer(fault: ScriptedFault) -> AnswerSchedule | None:
    """Returns a schedule that replaces the answer; None: this kind of fault does not replace it."""
    kind = fault.kind
    match kind:
        case FaultKind.STATUS:
            return _refusal(fault.status, "The script wants it so.", headers=fault.headers, end=kind)
        case FaultKind.CLOSE | FaultKind.BYTES:
            return AnswerSchedule(fault.text.encode(), ending=StreamEnding.CLOSE, end=kind, status=0, takes_turn=False)
        case FaultKind.ABORT:
            return AnswerSchedule(b"", ending=StreamEnding.RESET, end=kind, status=0, takes_turn=False)
        case FaultKind.SILENT:
            return AnswerSchedule(b"", ending=StreamEnding.STALL, end=kind, status=0, takes_turn=False)
        case _ if kind in _SAID_200:
            return AnswerSchedule(_SAID_200[kind], end=kind, takes_turn=False)
    return None


def _refusal(
    status: int, message: str, *, headers: dict[str, str] | None = None, param: str | None = None, end: str = "refused"
) -> AnswerSchedule:
    data = response(status, error_object(message, status, param), headers)
    return AnswerSchedule(data, end=end, status=status, takes_turn=False)


def _count(first: int, end: int) -> str:
    return "".join(f" {number}" if number else "0" for number in range(first, end))
