"""Server-sent events out of bytes, for where there are very many.

`maitred.wire.sse` reads any event stream that the standard allows. Gateway and tester read events at the rate of all
streams together, so the form that servers of OpenAI's API send, one ``data:`` line per event, is cut out with one
split; any other form takes the standard reader.
"""

from maitred.wire.sse import SSEDecoder


class SseSplitter:
    """The data of each event of one stream, as bytes.

    Attributes:
        idle: Whether all that came was whole events of the usual form, so that what comes next begins a new one.
    """

    def __init__(self) -> None:
        self.idle = True
        self._rest = b""
        self._any_form: SSEDecoder | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are complete with these bytes."""
        if (  # nearly always: one whole event
            self.idle
            and data.find(b"\n") == len(data) - 2
            and data.startswith(b"data: ")
            and data.endswith(b"\n")
            and b"\r" not in data
        ):
            return [data[6:-2]]
        if self._any_form is not None:
            return [event.data.encode() for event in self._any_form.feed(data)]
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            return self._change_over(data)
        whole, end, self._rest = data.rpartition(b"\n\n")
        self.idle = not self._rest
        if not end:
            return []
        events = whole[6:].split(b"\n\ndata: ")
        if not whole.startswith(b"data: ") or whole.count(b"\n") != 2 * (len(events) - 1):
            return self._change_over(data)
        return events

    def _change_over(self, data: bytes) -> list[bytes]:
        """Reads `data`, and all that follows, by the standard. Nothing of it has been given out yet."""
        self._any_form = SSEDecoder()
        self._rest = b""
        self.idle = False
        return self.feed(data)
