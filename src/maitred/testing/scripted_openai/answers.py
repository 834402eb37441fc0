"""From a request and the script to the bytes of its answer and the gaps between them. Pure: no clock, no socket.

The text of an answer counts: ``0 1 2 3 …``, one number per token, so a client can tell that nothing is missing. The
events of plain streams are made once and shared by all requests; only the last send of each is its own.
"""

import random
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import cycle, islice

import msgspec

from maitred.testing.scripted_openai.script import Fault, FaultKind, Script
from maitred.wire.sse import DONE, encode_comment, encode_event

END_OF_BODY = b"0\r\n\r\n"
BUNCH_EVENTS = 4
SPLIT_GAP_S = 0.001

KNOWN_FIELDS = frozenset(
    (
        "audio",
        "best_of",
        "echo",
        "frequency_penalty",
        "function_call",
        "functions",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "metadata",
        "modalities",
        "model",
        "n",
        "parallel_tool_calls",
        "prediction",
        "presence_penalty",
        "prompt",
        "prompt_cache_key",
        "reasoning_effort",
        "response_format",
        "safety_identifier",
        "seed",
        "service_tier",
        "stop",
        "store",
        "stream",
        "stream_options",
        "suffix",
        "temperature",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "user",
        "verbosity",
        "web_search_options",
    )
)
"""Top-level fields of the two requests in OpenAI's API reference."""


class Ending(Enum):
    """What happens to the connection after the last byte."""

    KEEP = auto()
    CLOSE = auto()
    RESET = auto()
    STALL = auto()
    """Nothing, for ever."""


@dataclass(slots=True)
class Answer:
    """What is sent, and when.

    Attributes:
        head: Sent as soon as the request has its turn.
        sends: The bytes of every further send.
        gaps_s: As many times in seconds: from the head, or from the send before, to each.
        events_per_send: Events that each send completes; None: one.
        ending: What happens afterwards.
        end: What to call it in the log.
        takes_turn: Whether it counts as one of the concurrent requests.
    """

    head: bytes
    sends: list[bytes] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    events_per_send: list[int] | None = None
    ending: Ending = Ending.KEEP
    end: str = "complete"
    status: int = 200
    takes_turn: bool = True
    stream: bool = False
    user: str = ""
    prompt_tokens: int = 0
    answer_tokens: int = 0


class _Part(msgspec.Struct):
    text: str = ""


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None

    def words(self) -> int:
        content = self.content
        parts = [content] if isinstance(content, str) else [part.text for part in content or []]
        return sum(len(part.split()) for part in parts)


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Question(msgspec.Struct):
    """What a request's body says, as far as the script cares."""

    messages: list[_Message] | None = None
    prompt: str | list[int | str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = None

    def words(self) -> int:
        """Words of the prompt, or the tokens of one that came as tokens."""
        if self.messages is not None:
            return sum(message.words() for message in self.messages)
        if isinstance(self.prompt, str):
            return len(self.prompt.split())
        return sum(1 if isinstance(item, int) else len(item.split()) for item in self.prompt or [])


_question = msgspec.json.Decoder(Question)


class Answers:
    """Makes the answers of one script.

    Args:
        script: What they are like.
        created: Unix time that they carry.
    """

    def __init__(self, script: Script, created: int = 0) -> None:
        self._script = script
        self._created = created
        self._gaps_s = script.itl.table(random.Random(script.seed))
        self._chunks: dict[bool, list[bytes]] = {True: [], False: []}

    def models(self) -> bytes:
        """The response to ``GET /v1/models``."""
        model = {"id": self._script.model, "object": "model", "created": self._created, "owned_by": "script"}
        return response(200, {"object": "list", "data": [model]})

    def answer(self, number: int, *, chat: bool, body: bytes, least_gap_s: float = 0.0) -> Answer:
        """The answer to one request.

        Args:
            number: Of the request.
            chat: Whether it is a chat completion; else a completion of text.
            body: JSON.
            least_gap_s: The server's capacity now, as time per event; for answers that are not streamed.
        """
        script = self._script
        rng = script.rng_of(number)
        faults = script.faults_of(number, rng)
        ttft_s = script.ttft.draw(rng)
        if faults and faults[0].kind is FaultKind.STATUS:
            return _refusal(faults[0].status, "The script wants it so.", headers=faults[0].headers, end="status")
        if faults and faults[0].kind is FaultKind.CLOSE:
            return Answer(b"", ending=Ending.CLOSE, end="close", status=0, takes_turn=False)
        try:
            question = _question.decode(body)
            unknown = sorted(set(msgspec.json.decode(body)) - KNOWN_FIELDS) if script.strict else []
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _refusal(400, f"The body is not a request: {error}.")
        if unknown:
            return _refusal(400, f"Unrecognized request argument supplied: {unknown[0]}", param=unknown[0])
        tokens = question.max_completion_tokens or question.max_tokens or script.default_tokens
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
            closing = self._closing(chat, usage if options is not None and options.include_usage else None)
            answer = self._stream(chat, gaps_s, tokens, closing, faults, rng)
        else:
            seconds = ttft_s + sum(max(gap_s, least_gap_s) for gap_s in gaps_s[1:])
            answer = self._whole(chat, seconds, tokens, usage, faults)
        answer.user = question.user or ""
        answer.prompt_tokens, answer.answer_tokens = prompt_tokens, tokens
        return answer

    # --- streams ---

    def _stream(
        self,
        chat: bool,
        gaps_s: list[float],
        tokens: int,
        closing: bytes,
        faults: list[Fault],
        rng: random.Random,
    ) -> Answer:
        role = self._event(chat, {"role": "assistant", "content": ""}) if chat and self._script.early_role else b""
        if any(fault.kind is FaultKind.CRLF for fault in faults):
            role = role.replace(b"\n", b"\r\n")
        head = _head(200, "text/event-stream; charset=utf-8", {"transfer-encoding": "chunked"}) + _chunk(role)
        before_last = len(gaps_s) - 1
        last = self._text_event(chat, before_last, tokens)
        if not faults:
            end = _chunk(last) + _chunk(closing) + END_OF_BODY
            return Answer(head, [*self._shared(chat, before_last)[:before_last], end], gaps_s, stream=True)
        events = [*(self._text_event(chat, index, tokens) for index in range(before_last)), last]
        odd = _OddStream([_Send(gap_s, event, 1) for gap_s, event in zip(gaps_s, events, strict=True)], closing)
        for fault in faults:
            odd.apply(fault, rng)
        if odd.ends_body and not odd.sends:
            odd.sends.append(_Send(0.0, b"", 0))
        sends = [_chunk(send.data) for send in odd.sends]
        if odd.ends_body:
            sends[-1] += END_OF_BODY
        return Answer(
            head,
            sends,
            [send.gap_s for send in odd.sends],
            events_per_send=[send.events for send in odd.sends],
            ending=odd.ending,
            end=odd.end,
            stream=True,
        )

    def _shared(self, chat: bool, events: int) -> list[bytes]:
        """Chunks of at least so many full events."""
        chunks = self._chunks[chat]
        for index in range(len(chunks), events):
            chunks.append(_chunk(self._text_event(chat, index, (index + 1) * self._script.tokens_per_event)))
        return chunks

    def _text_event(self, chat: bool, index: int, tokens: int) -> bytes:
        """The event of this index in an answer of so many tokens."""
        first = index * self._script.tokens_per_event
        text = _count(first, min(first + self._script.tokens_per_event, tokens))
        return self._event(chat, {"content": text} if chat else text)

    def _closing(self, chat: bool, usage: object) -> bytes:
        """What follows the last text at once."""
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

    def _whole(self, chat: bool, seconds: float, tokens: int, usage: object, faults: list[Fault]) -> Answer:
        text = _count(0, tokens)
        content: dict[str, object] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
        data = response(200, {**self._frame(chat, whole=True), "choices": [choice], "usage": usage})
        answer = Answer(b"")
        for fault in faults:
            answer.end = fault.kind
            match fault.kind:
                case FaultKind.CUT | FaultKind.RESET:
                    data = data[:-10]
                    answer.ending = Ending.RESET if fault.kind is FaultKind.RESET else Ending.CLOSE
                case FaultKind.GARBAGE | FaultKind.ERROR_EVENT | FaultKind.NO_DONE:
                    data = _head(200, "application/json", {"content-length": "5"}) + b"{oops"
                case FaultKind.STALL if fault.for_s is not None:
                    seconds += fault.for_s
                case FaultKind.STALL:
                    answer.ending = Ending.STALL
                    return answer
                case _:  # odd streams only
                    answer.end = "complete"
        answer.sends, answer.gaps_s = [data], [seconds]
        return answer


@dataclass(slots=True)
class _Send:
    gap_s: float
    data: bytes
    events: int


class _OddStream:
    """A stream on its way through the faults that meet it."""

    def __init__(self, sends: list[_Send], closing: bytes) -> None:
        sends[-1].data += closing
        self.sends = sends
        self.ends_body = True
        self.ending = Ending.KEEP
        self.end = "complete"
        self._closing = closing

    def apply(self, fault: Fault, rng: random.Random) -> None:
        """Does to the stream what the fault asks for."""
        after = min(fault.after, len(self.sends))
        match fault.kind:
            case FaultKind.GARBAGE:
                self.sends.insert(min(after, len(self.sends) - 1), _Send(0.0, b"data: {oops\n\n", 0))
                self.end = fault.kind
            case FaultKind.STALL if fault.for_s is not None:
                self.sends[min(after, len(self.sends) - 1)].gap_s += fault.for_s
            case FaultKind.ERROR_EVENT:
                error = encode_event(msgspec.json.encode(_error("The script wants an error here.", 500)))
                gap_s = self.sends[after].gap_s if after < len(self.sends) else 0.0
                self._end(after, fault.kind)
                self.sends.append(_Send(gap_s, error, 0))
            case FaultKind.STALL:
                self._end(after, fault.kind, Ending.STALL)
            case FaultKind.CUT:
                self._end(after, fault.kind, Ending.CLOSE)
            case FaultKind.RESET:
                self._end(after, fault.kind, Ending.RESET)
            case FaultKind.NO_DONE:
                whole = after == len(self.sends)
                self._end(after, fault.kind)
                if whole:
                    self.sends[-1].data += self._closing.removesuffix(DONE)
            case FaultKind.BUNCHED:
                bunches = [self.sends[at : at + BUNCH_EVENTS] for at in range(0, len(self.sends), BUNCH_EVENTS)]
                self.sends = [
                    _Send(sum(s.gap_s for s in bunch), b"".join(s.data for s in bunch), sum(s.events for s in bunch))
                    for bunch in bunches
                ]
            case FaultKind.PINGS:
                ping = encode_comment("ping")
                self.sends = [
                    half
                    for send in self.sends
                    for half in (_Send(send.gap_s / 2, ping, 0), _Send(send.gap_s / 2, send.data, send.events))
                ]
            case FaultKind.CRLF:
                for send in self.sends:
                    send.data = send.data.replace(b"\n", b"\r\n")
            case FaultKind.SPLIT:
                self.sends = [piece for send in self.sends for piece in _split(send, rng)]
            case FaultKind.STATUS | FaultKind.CLOSE:
                raise AssertionError(f"{fault.kind} has no stream")

    def _end(self, after: int, kind: FaultKind, ending: Ending = Ending.KEEP) -> None:
        """No more than so many events, and nothing of the proper end."""
        if after == len(self.sends) and after:
            self.sends[-1].data = self.sends[-1].data.removesuffix(self._closing)
        del self.sends[after:]
        self.ends_body = ending is Ending.KEEP
        self.ending, self.end = ending, kind


def response(status: int, body: object, headers: dict[str, str] | None = None) -> bytes:
    """A whole HTTP response with a JSON body."""
    data = msgspec.json.encode(body)
    return _head(status, "application/json", {"content-length": str(len(data)), **(headers or {})}) + data


def _refusal(
    status: int, message: str, *, headers: dict[str, str] | None = None, param: str | None = None, end: str = "refused"
) -> Answer:
    data = response(status, _error(message, status, param), headers)
    return Answer(data, end=end, status=status, takes_turn=False)


def _error(message: str, status: int, param: str | None = None) -> dict[str, object]:
    kind = "invalid_request_error" if status == 400 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def _head(status: int, content_type: str, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Scripted", "server: maitred-scripted", f"content-type: {content_type}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()


def _chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; an empty one would end it, so it is left out."""
    return b"%x\r\n%s\r\n" % (len(data), data) if data else b""


def _count(first: int, end: int) -> str:
    return "".join(f" {number}" if number else "0" for number in range(first, end))


def _split(send: _Send, rng: random.Random) -> list[_Send]:
    cuts = sorted(rng.sample(range(1, len(send.data)), 2))
    pieces = [send.data[: cuts[0]], send.data[cuts[0] : cuts[1]], send.data[cuts[1] :]]
    gaps_s = (send.gap_s, SPLIT_GAP_S, SPLIT_GAP_S)
    return [
        _Send(gap_s, piece, send.events if last else 0)
        for gap_s, piece, last in zip(gaps_s, pieces, (False, False, True), strict=True)
    ]
