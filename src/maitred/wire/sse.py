"""Server-sent events, both ways: how a stream is written, and an incremental reader of one.

The reader follows "Interpreting an event stream" of the WHATWG HTML standard: lines end in LF, CR or CRLF, a byte
order mark at the start is skipped, a blank line dispatches, an event cut off by the end of the stream is dropped.

**Templates** encode an event once, and then insert only what differs. Nearly all bytes of a stream event are the same
in each event: ids, names, a time, the order of the fields. Only the text is new. So the caller, which knows the fields,
encodes an event twice, with two texts of one letter; the text stands where the two differ, and the bytes around it are
the same for every other text.

Whole answers differ in more places, but most of them in the same few. One answer is encoded with a mark in each of
these places.
"""

import codecs
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

DONE = b"data: [DONE]\n\n"
"""The last event of every complete stream of the OpenAI API."""


def encode_event(data: bytes, kind: bytes = b"") -> bytes:
    """Encodes one event, with its type if it has one. The data must be a single line, as JSON from an encoder is."""
    return (b"event: " + kind + b"\n" if kind else b"") + b"data: " + data + b"\n\n"


def encode_comment(text: str) -> bytes:
    """Encodes a comment, which readers skip; it keeps a silent connection alive."""
    return b"".join(b": " + line.encode() + b"\n" for line in text.splitlines() or [""]) + b"\n"


class SSEEvent(msgspec.Struct, frozen=True):
    """One event of a stream of server-sent events."""

    data: str
    type: str = "message"
    id: str = ""
    """The last id seen on the stream, in this event or before."""


class SSEDecoder:
    """Cuts a byte stream into events; holds the unfinished rest between calls.

    Attributes:
        retry_ms: How long the server wants clients to wait before they reconnect, once it has said so.
    """

    def __init__(self) -> None:
        self.retry_ms: int | None = None
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
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
            # The CR before ended its line already; this may be the second half of a CRLF.
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

    `SSEDecoder` reads any event stream that the standard allows. Gateway and load tester read events at the rate of all
    streams together, so the form that servers of OpenAI's API send, one ``data:`` line per event, is cut out with one
    split; any other form takes the standard parser.

    Attributes:
        idle: Whether all bytes so far were whole events of the usual form, so that the next bytes begin a new event.
    """

    def __init__(self) -> None:
        self.idle = True
        self._unfinished = b""
        self._decoder: SSEDecoder | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of the events that are complete with these bytes."""
        if (  # nearly always: one whole event
            self.idle
            and data.find(b"\n") == len(data) - 2
            and data.startswith(b"data: ")
            and data.endswith(b"\n")
            and b"\r" not in data
        ):
            return [data[6:-2]]
        if self._decoder is not None:
            return [event.data.encode() for event in self._decoder.feed(data)]
        if self._unfinished:
            data = self._unfinished + data
        if b"\r" in data:
            return self._switch_to_decoder(data)
        whole, end, self._unfinished = data.rpartition(b"\n\n")
        self.idle = not self._unfinished
        if not end:
            return []
        events = whole[6:].split(b"\n\ndata: ")
        if not whole.startswith(b"data: ") or whole.count(b"\n") != 2 * (len(events) - 1):
            return self._switch_to_decoder(data)
        return events

    def _switch_to_decoder(self, data: bytes) -> list[bytes]:
        """Decodes `data`, and all that follows, by the standard. No event of `data` has been returned yet."""
        self._decoder = SSEDecoder()
        self._unfinished = b""
        self.idle = False
        return self.feed(data)


encode_text = msgspec.json.Encoder().encode
"""Encodes a text as a JSON string."""


class EventTemplate:
    """Template of events that differ in one text.

    Args:
        encode_event: Encodes an event in full, as a function of its text alone, which stands in it once and as a JSON
            string.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, encode_event: Callable[[str], bytes]) -> None:
        first, second = encode_event("a"), encode_event("b")
        offset = 0
        while first[offset] == second[offset]:
            offset += 1
        self._before, self._after = first[: offset - 1], first[offset + 2 :]  # the text's quotes are cut off

    def encode(self, text: str) -> bytes:
        """Encodes the event with this text."""
        return self._before + encode_text(text) + self._after


class EventTemplates:
    """Templates of one answer, one for each choice, made on first use."""

    __slots__ = ("_templates",)

    def __init__(self) -> None:
        self._templates: dict[int, EventTemplate] = {}

    def encode(self, index: int, text: str, encode_full: Callable[[int, str], bytes]) -> bytes:
        """Encodes the event that adds text to a choice.

        Args:
            index: The choice.
            text: The text.
            encode_full: Encodes such an event in full; the same each time. It is not stored: a reference cycle through
                it would
                be freed by the garbage collector only.
        """
        template = self._templates.get(index)
        if template is None:
            template = self._templates[index] = EventTemplate(partial(encode_full, index))
        return template.encode(text)


class JsonTemplate:
    """Template of JSON answers that differ in some places.

    Args:
        answer: One encoded answer, with a mark in each of these places.
        marks: The marks in the order of the places, each of which stands in the answer once: whole numbers, and texts;
            texts of JSON with their quotes.

    Attributes:
        fill: Encodes an answer with these values in the places of the marks, in the order of the places.
    """

    __slots__ = ("fill",)

    def __init__(self, answer: bytes, marks: Iterable[bytes]) -> None:
        template = answer.replace(b"%", b"%%")
        for mark in marks:
            if template.count(mark) != 1:
                raise ValueError(f"The mark {mark!r} does not stand exactly once in {answer!r}.")
            template = template.replace(mark, b"%d" if mark.isdigit() else b"%b")
        self.fill = template.__mod__
