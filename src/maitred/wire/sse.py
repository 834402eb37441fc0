"""Server-sent events: an encoder of event streams and an incremental decoder.

The reader follows "Interpreting an event stream" of the WHATWG HTML standard: lines end in LF, CR or CRLF, a byte
order mark at the start is skipped, a blank line dispatches, an event cut off by the end of the stream is dropped.

**Templates** encode an event once, and then insert only what differs. Almost all bytes are the same in each event of a
stream: ids, names, a time, and the order of the fields. Only the text is new. The caller, which knows the fields,
therefore encodes an event twice, with two different one-letter texts; the text position is where the two results
differ, and all other bytes are the same for every text.

Whole answers differ in more positions, but most of them differ in the same few. The caller encodes one answer with a
unique marker value at each of these positions.
"""

import codecs
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

DONE = b"data: [DONE]\n\n"
"""The last event of every complete stream of the OpenAI API."""


def encode_event(data: bytes, kind: bytes = b"") -> bytes:
    """Encodes one event, with its type if it has one.

    The data must be a single line, as the output of a JSON encoder is.
    """
    return (b"event: " + kind + b"\n" if kind else b"") + b"data: " + data + b"\n\n"


def encode_comment(text: str) -> bytes:
    """Encodes a comment, which readers skip; it keeps a silent connection alive."""
    return b"".join(b": " + line.encode() + b"\n" for line in text.splitlines() or [""]) + b"\n"


class SSEEvent(msgspec.Struct, frozen=True):
    """One event of a stream of server-sent events."""

    data: str
    type: str = "message"
    id: str = ""
    """Last id on the stream, from this event or an earlier one."""


class SSEDecoder:
    """Decoder that splits a byte stream into events, and keeps the incomplete rest between calls.

    Args:
        errors: What becomes of bytes that are no UTF-8, as for `codecs`.

    Attributes:
        retry_ms: Time that the server wants clients to wait before they reconnect, if it has sent one.
    """

    def __init__(self, errors: str = "replace") -> None:
        self.retry_ms: int | None = None
        self._characters = codecs.getincrementaldecoder("utf-8")(errors)
        self._line: list[str] = []
        self._at_start = True
        self._skip_line_feed = False
        self._data: list[str] = []
        self._type = ""
        self._id = ""

    def feed(self, data: bytes) -> list[SSEEvent]:
        """Returns the events that are complete with these bytes."""
        text = self._characters.decode(data)
        if not text:
            return []
        if self._at_start:
            self._at_start = False
            text = text.removeprefix("\ufeff")
        if self._skip_line_feed and text:
            # The previous CR has ended its line already; this LF may be the second half of a CRLF.
            self._skip_line_feed = False
            text = text.removeprefix("\n")
        self._skip_line_feed = text.endswith("\r")
        *lines, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        events: list[SSEEvent] = []
        for line_end in lines:
            self._line.append(line_end)
            line = "".join(self._line)
            self._line.clear()
            if line:
                self._read_field(line)
            elif event := self._dispatch():
                events.append(event)
        if rest:
            self._line.append(rest)
        return events

    def _read_field(self, line: str) -> None:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match field:
            case "data":
                self._data.append(value)
            case "event":
                self._type = value
            case "error" if value.startswith("{"):  # older builds of llama.cpp
                self._type = "error"
                self._data.append(value)
            case "id" if "\0" not in value:
                self._id = value
            case "retry" if value.isascii() and value.isdigit() and len(value) <= 18:
                self.retry_ms = int(value)

    def _dispatch(self) -> SSEEvent | None:
        event = SSEEvent("\n".join(self._data), self._type or "message", self._id) if self._data else None
        self._data = []
        self._type = ""
        return event


class SSESplitter:
    """Splits one stream into the data of its events, as bytes.

    `SSEDecoder` reads any event stream that the standard allows. The gateway and the load tester read all events of all
    streams, so the usual form of servers of OpenAI's API, one ``data:`` line per event, is parsed with one split; every
    other form uses the standard parser.

    Attributes:
        idle: Whether all bytes so far were complete events of the usual form, so that the next bytes begin a new event.
    """

    def __init__(self) -> None:
        self.idle = True
        self._unfinished = b""
        self._decoder: SSEDecoder | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of the events that are complete with these bytes."""
        if (  # the usual case: the bytes are exactly one event
            self.idle
            and data.find(b"\n") == len(data) - 2
            and data.startswith(b"data: ")
            and data.endswith(b"\n")
            and b"\r" not in data
        ):
            return [data[6:-2]]
        if self._decoder is not None:
            return [_data_of(event) for event in self._decoder.feed(data)]
        if self._unfinished:
            data = self._unfinished + data
        if b"\r" in data:
            return self._switch_to_decoder(data)
        whole, end, self._unfinished = data.rpartition(b"\n\n")
        self.idle = not self._unfinished
        if not end:
            return []
        events = whole[6:].split(b"\n\ndata: ")
        if not whole.startswith(b"data: ") or b"\n" in b"".join(events):
            return self._switch_to_decoder(data)
        return events

    def _switch_to_decoder(self, data: bytes) -> list[bytes]:
        """Decodes `data` and all later bytes with the standard decoder.

        No event of `data` may have been returned before.
        """
        self._decoder = SSEDecoder("surrogateescape")
        self._unfinished = b""
        self.idle = False
        return self.feed(data)


def _data_of(event: SSEEvent) -> bytes:
    """Returns the data of an event; that of an error whose name alone says so becomes the member `error`."""
    data = event.data.encode("utf-8", "surrogateescape")
    if event.type != "error" or b'"error"' in data:
        return data
    is_json = data.startswith((b"{", b"[", b'"'))
    return b'{"error":%b}' % (data if is_json else encode_text(event.data.encode("utf-8", "replace").decode()))


encode_text = msgspec.json.Encoder().encode
"""Encodes a text as a JSON string."""


class EventTemplate:
    """Template of events that differ in one text.

    Args:
        encode_event: Function that encodes a complete event from its text; the text must occur in it exactly once, as a
            JSON string.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, encode_event: Callable[[str], bytes]) -> None:
        first, second = encode_event("a"), encode_event("b")
        offset = 0
        while first[offset] == second[offset]:
            offset += 1
        self._before, self._after = first[: offset - 1], first[offset + 2 :]  # the quotes of the text are removed

    def encode(self, text: str) -> bytes:
        """Encodes the event with this text."""
        return self._before + encode_text(text) + self._after


class EventTemplates(dict[int, EventTemplate]):
    """Templates of one answer by choice, made on first use."""

    def encode(self, index: int, text: str, encode_full: Callable[[int, str], bytes]) -> bytes:
        """Encodes the event that adds text to a choice.

        Args:
            index: The choice.
            text: The text.
            encode_full: Function that encodes such an event completely, the same function each time. The function is
                not stored, because only the garbage collector would free a reference cycle through it.
        """
        template = self.get(index)
        if template is None:
            template = self[index] = EventTemplate(partial(encode_full, index))
        return template.encode(text)


class JsonTemplate:
    """Template of JSON answers that differ in a few positions.

    Args:
        answer: One encoded answer, with a marker value at each of these positions.
        marks: Marker values in the order of their positions; each occurs once in the answer. They are whole numbers and
            JSON texts with their quotes.

    Attributes:
        fill: Function that encodes an answer with these values at the positions of the markers, in their order.
    """

    __slots__ = ("fill",)

    def __init__(self, answer: bytes, marks: Iterable[bytes]) -> None:
        template = answer.replace(b"%", b"%%")
        for mark in marks:
            if template.count(mark) != 1:
                raise ValueError(f"The mark {mark!r} does not stand exactly once in {answer!r}.")
            template = template.replace(mark, b"%d" if mark.isdigit() else b"%b")
        self.fill = template.__mod__
