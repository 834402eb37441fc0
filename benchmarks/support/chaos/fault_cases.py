"""What can go wrong with an upstream, as data: each fault with what its caller must see.

Three times matter. A fault that was there *before the request* is known from the looks at the server, so nobody is sent
to it. One *before the first byte* of the answer leaves the caller with nothing, so somebody else can be asked. One *in
the middle* has shown a part of the answer to a caller who streams, and that part cannot be taken back.
"""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from maitred.testing.scripted_openai import FaultKind, ScriptedFault

TOKENS = 8
RETRIES = 2
"""That a request may have."""
TEXT = "0 1 2 3 4 5 6 7"
"""The whole answer to a request for so many tokens."""


class Time(StrEnum):
    """When a fault strikes."""

    KNOWN = "before the request"
    BEFORE = "before the first byte"
    MIDDLE = "in the middle"
    NEVER = "odd, but whole"


class Seen(StrEnum):
    """What the caller gets."""

    WHOLE = "the whole answer"
    REFUSED = "400"
    LOST = "502"
    AWAY = "503"
    BROKEN = "error event"


class Place(StrEnum):
    """Servers that are not scripted: where the upstream's URL leads."""

    NOBODY = "nobody"
    NO_NAME = "no_name"
    NO_TLS = "no_tls"
    UNTRUSTED = "untrusted"
    UNACCEPTED = "unaccepted"
    GONE = "gone"


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        name: Short, for models and results.
        what: For people.
        time: When it strikes.
        seen: What the caller gets where there is no other server, streaming or not.
        fault: Of the scripted server...
        place: ...or where the upstream is instead.
        retry_after: The header that the caller must get, in seconds; None: whatever.
        calls: That reach the server where there is no other and the caller does not stream: the first, and those that
            try again after a pause.
        tokens: That are asked for.
        estimated: Whether the usage is nobody's count.
        hopeless: Whether a sound server would do no better.
    """

    name: str
    what: str
    time: Time
    seen: Seen
    fault: ScriptedFault | None = None
    place: Place | None = None
    retry_after: int | None = None
    calls: int = 1
    tokens: int = TOKENS
    estimated: bool = False
    hopeless: bool = False


def expected(case: Case, *, stream: bool, second: bool) -> Seen:
    """What the caller of a case must see.

    Args:
        case: The fault.
        stream: Whether the answer is streamed.
        second: Whether there is a second server, a sound one.
    """
    if case.time is Time.MIDDLE and stream:
        # What was seen of an answer cannot be taken back, and the sampling of others cannot be taken up.
        return Seen.BROKEN
    return Seen.WHOLE if second and not case.hopeless and case.seen is not Seen.REFUSED else case.seen


def _known(name: str, what: str, place: Place) -> Case:
    return Case(name, what, Time.KNOWN, Seen.AWAY, place=place)


def _status(status: int, what: str, seen: Seen, **headers: str) -> Case:
    fault = ScriptedFault(
        kind=FaultKind.STATUS, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )
    retry_after = int(headers["retry_after"]) if "retry_after" in headers else None
    name = f"status-{status}" + ("-with-time" if headers else "")
    again = status in _TRIED_AGAIN and not headers  # seven seconds are longer than anybody is made to wait
    return Case(name, what, Time.BEFORE, seen, fault, retry_after=retry_after, calls=1 + RETRIES if again else 1)


def _before(
    name: str, what: str, kind: FaultKind, seen: Seen = Seen.LOST, text: str = "", calls: int = 1 + RETRIES
) -> Case:
    return Case(name, what, Time.BEFORE, seen, ScriptedFault(kind=kind, after=0, text=text), calls=calls)


def _middle(name: str, what: str, kind: FaultKind, after: int = 3, text: str = "", calls: int = 1 + RETRIES) -> Case:
    return Case(name, what, Time.MIDDLE, Seen.LOST, ScriptedFault(kind=kind, after=after, text=text), calls=calls)


def _odd(name: str, what: str, kind: FaultKind, for_s: float | None = None, *, after: int = 3, text: str = "") -> Case:
    return Case(name, what, Time.NEVER, Seen.WHOLE, ScriptedFault(kind=kind, after=after, for_s=for_s, text=text))


def _response(status: str, content_type: str, body: str, **headers: str) -> str:
    lines = [f"HTTP/1.1 {status}", f"content-type: {content_type}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", body])


def _refusal(name: str, what: str, content_type: str, body: str, seen: Seen = Seen.REFUSED) -> Case:
    text = _response("400 Bad Request", content_type, body)
    return _before(name, what, FaultKind.BYTES, seen, text, calls=1)


def _chunk(index: int = 0, content: str = "", finish: str | None = None) -> str:
    choice = {"index": index, "delta": {"content": content}, "finish_reason": finish}
    return msgspec.json.encode({"object": "chat.completion.chunk", "choices": [choice]}).decode()


_TRIED_AGAIN = frozenset({408, 429, 500, 502, 503, 504, 529})
_PAGE = "<!doctype html><h1>Bad Gateway</h1>"
_WHOLE = msgspec.json.encode(
    {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"content": TEXT}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": TOKENS, "total_tokens": 3 + TOKENS},
    }
).decode()
_JSON = _response("200 OK", "application/json", _WHOLE)
_LATE = _response("200 OK", "application/json; charset=utf-8", f"\n{_WHOLE}")
_ONE_EVENT = _response("200 OK", "text/event-stream", f"data: {_WHOLE}\n\ndata: [DONE]\n\n")
_LIST = msgspec.json.encode(
    [{"error": {"code": 400, "message": "Unknown name", "status": "INVALID_ARGUMENT"}}]
).decode()
_NO_CREDIT = msgspec.json.encode(
    {"error": {"type": "invalid_request_error", "message": "Your credit balance is too low."}}
).decode()
_USAGE = msgspec.json.encode(
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": TOKENS, "total_tokens": 3 + TOKENS}}
).decode()


def _events(*data: str, end: str = "data: [DONE]\n\n", content_type: str = "text/event-stream") -> str:
    """Makes a response of events, of which the first has half of the text."""
    body = "".join(f"data: {event}\n\n" for event in (_chunk(content=TEXT[:8]), *data, _USAGE)) + end
    return _response("200 OK", content_type, body)


_REST = _chunk(content=TEXT[8:])
_TOP = {"token": "0", "logprob": -0.1, "decoded": "0"}
_SCORE = {"id": 7, "token": "0", "logprob": -0.1, "bytes": None, "rank": 1, "top_logprobs": [_TOP]}
_SCORED = msgspec.json.encode(
    {
        "choices": [{"index": 0, "delta": {"content": TEXT[8:]}, "logprobs": {"content": [_SCORE]}, "token_ids": [5]}],
        "x_gateway": {"id": "r"},
    }
).decode()
_PARTS = msgspec.json.encode(
    {"choices": [{"index": 0, "delta": {"content": [{"type": "text", "text": TEXT[8:]}]}, "finish_reason": None}]}
).decode()
_DONE_ONLY = _response("200 OK", "text/event-stream", "data: [DONE]\n\n")

KNOWN = (
    _known("refused", "connection refused", Place.NOBODY),
    _known("no-name", "its name does not resolve", Place.NO_NAME),
    _known("no-tls", "TLS: the server does not speak it", Place.NO_TLS),
    _known("untrusted", "TLS: its certificate is not to be trusted", Place.UNTRUSTED),
    _known("unaccepted", "no connection within the time", Place.UNACCEPTED),
)
BEFORE = (
    Case("gone", "it stops after it was found: connection refused", Time.BEFORE, Seen.AWAY, place=Place.GONE),
    _before("closed", "connection closed before the response", FaultKind.CLOSE),
    _before("reset", "connection reset before the response", FaultKind.ABORT),
    _before("silent", "no response at all", FaultKind.SILENT, Seen.AWAY, calls=1),
    _before("not-http", "a response that is not HTTP", FaultKind.BYTES, text="SSH-2.0-OpenSSH_9.2\r\n"),
    _before(
        "redirect",
        "307 to somewhere else",
        FaultKind.BYTES,
        Seen.AWAY,
        _response("307 Temporary Redirect", "text/plain", "", location="http://127.0.0.1:9/v1"),
        calls=1,
    ),
    _status(400, "400: the request is at fault", Seen.REFUSED),
    _refusal("fault-in-list", "400 with the error in a list", "application/json", _LIST),
    _refusal("fault-page", "400 with a page for people", "text/html", _PAGE),
    _refusal("fault-empty", "400 with nothing", "text/plain", ""),
    _refusal("no-credit", "400: our account has no credit", "application/json", _NO_CREDIT, Seen.AWAY),
    _status(401, "401: our credential is refused", Seen.AWAY),
    _status(402, "402: our account is to be paid", Seen.AWAY),
    _status(403, "403: our credential may not", Seen.AWAY),
    _status(404, "404: the model is not known there", Seen.AWAY),
    _status(405, "405: the request is at fault", Seen.REFUSED),
    _status(408, "408", Seen.AWAY),
    _status(422, "422: the request is at fault", Seen.REFUSED),
    _status(429, "429", Seen.AWAY),
    _status(429, "429 with `Retry-After: 7`", Seen.AWAY, retry_after="7"),
    _status(500, "500", Seen.LOST),
    _before("page-502", "502 with a page for people", FaultKind.BYTES, text=_response("502 No", "text/html", _PAGE)),
    _status(503, "503", Seen.AWAY),
    _status(503, "503 with `Retry-After: 7`", Seen.AWAY, retry_after="7"),
    _status(504, "504", Seen.LOST),
    _status(529, "529: overloaded", Seen.AWAY),
    _before("html", "200 with a page for people", FaultKind.HTML),
    _before("empty", "200 with nothing", FaultKind.EMPTY),
    _before("error-in-200", "200 with an error as its body", FaultKind.ERROR_BODY),
    _before("error-first", "200, then an error as its first event", FaultKind.ERROR_EVENT),
    _before("done-only", "200, then nothing but `[DONE]`", FaultKind.BYTES, text=_DONE_ONLY),
    _before("stall-head", "200, then silence", FaultKind.STALL, Seen.AWAY, calls=1),
    _before("drip-head", "200, then signs of life and no answer", FaultKind.DRIP, Seen.AWAY, calls=1),
    _before("cut-head", "200, then the connection is closed", FaultKind.CUT),
    _before("reset-head", "200, then the connection is reset", FaultKind.RESET),
    _before("half-first", "200, then half an event", FaultKind.HALF_EVENT),
    _before("garbage-first", "200, then an event that is no JSON", FaultKind.GARBAGE),
    _before("length-head", "200 with a content length, and nothing of it", FaultKind.SHORT_LENGTH),
)  # fmt: skip
MIDDLE = (
    _middle("cut", "connection closed", FaultKind.CUT),
    _middle("cut-last", "connection closed before the end of the last choice", FaultKind.CUT, TOKENS),
    _middle("cut-reset", "connection reset", FaultKind.RESET),
    _middle("stall", "silence", FaultKind.STALL),
    _middle("drip", "signs of life and no more of the answer", FaultKind.DRIP, calls=1),
    _middle("error", "an error event", FaultKind.ERROR_EVENT),
    _middle("half", "half an event", FaultKind.HALF_EVENT),
    _middle("length", "content length that promised more", FaultKind.SHORT_LENGTH),
    _middle("garbage", "an event that is no JSON", FaultKind.GARBAGE),
    _middle("no-end", "the body ends, and the answer does not", FaultKind.NO_DONE),
    _middle("twice", "a chunk is sent twice", FaultKind.TWICE),
    _middle("aborted", "its finish reason is `abort`", FaultKind.EVENT, text=_chunk(finish="abort")),
    _middle("stranger", "a choice that was not asked for", FaultKind.EVENT, text=_chunk(1, " 3")),
    _middle("after-end", "the choice goes on after its end", FaultKind.EVENT, text=_chunk(finish="stop")),
    Case(
        "endless",
        "longer than `total_timeout_s`",
        Time.MIDDLE,
        Seen.LOST,
        ScriptedFault(kind=FaultKind.SPLIT),
        tokens=400,
        hopeless=True,
    ),
)
ODD = (
    Case("no-usage", "no usage", Time.NEVER, Seen.WHOLE, ScriptedFault(kind=FaultKind.NO_USAGE), estimated=True),
    _odd("json", "a whole answer where a stream was asked for", FaultKind.BYTES, text=_JSON),
    _odd("json-late", "the same behind an empty line", FaultKind.BYTES, text=_LATE),
    _odd("json-event", "the same as one event", FaultKind.BYTES, text=_ONE_EVENT),
    _odd(
        "members",
        "members that nobody knows: of a chunk, a choice and its log-probabilities",
        FaultKind.BYTES,
        text=_events(_SCORED, _chunk(finish="length")),
    ),
    _odd("no-done", "the answer and the body end, and `[DONE]` is missing", FaultKind.NO_DONE, after=TOKENS),
    _odd(
        "done-open",
        "`[DONE]` without its blank line",
        FaultKind.BYTES,
        text=_events(_REST, _chunk(finish="length"), end="data: [DONE]"),
    ),
    _odd(
        "end-twice",
        "an end that is said twice",
        FaultKind.BYTES,
        text=_events(_REST, _chunk(finish="length"), _chunk(finish="length")),
    ),
    _odd(
        "end-word",
        "another word for the end, such as `MAX_TOKENS`",
        FaultKind.BYTES,
        text=_events(_REST, _chunk(finish="MAX_TOKENS")),
    ),
    _odd("parts", "a content in parts", FaultKind.BYTES, text=_events(_PARTS, _chunk(finish="length"))),
    _odd(
        "content-type",
        "events that are called JSON",
        FaultKind.BYTES,
        text=_events(_REST, _chunk(finish="length"), content_type="application/json"),
    ),
    _odd("no-terminator", "connection closed after `[DONE]`, without the end of the body", FaultKind.NO_END),
    _odd("bunched", "several events in one segment", FaultKind.BUNCHED),
    _odd("pings", "comments between events", FaultKind.PINGS),
    _odd("empty-event", "an event without data", FaultKind.EVENT),
    _odd("word", "an event that is a word, such as `ping`", FaultKind.EVENT, text="ping"),
    _odd("no-event", "an event that is no chunk", FaultKind.EVENT, text='{"ping": 1}'),
    _odd("crlf", "lines end in CR LF", FaultKind.CRLF),
    _odd("split", "events cut anywhere", FaultKind.SPLIT),
    _odd("pause", "a pause shorter than `idle_timeout_s`", FaultKind.STALL, 0.15),
)
CASES = (*KNOWN, *BEFORE, *MIDDLE, *ODD)
