"""Body that is one JSON value in place of the stream of events that was asked for."""

from maitred.replica.upstream.errors import make_replica_lost

MAX_EVENT_BYTES = 8 << 20
"""Maximum size of an event, and of such a body. The largest valid ones have log-probabilities of many tokens."""


class WholeBody:
    """Collector of a body that begins as JSON does, and of the size of an event that has not ended.

    Attributes:
        value: The body so far; None: it is a stream, or nothing but white space has come.
        has_data: Whether anything but white space has come.
        unfinished_bytes: Bytes of the event that has not ended.
    """

    def __init__(self) -> None:
        self.value: bytearray | None = None
        self.has_data = False
        self.unfinished_bytes = 0

    def add(self, data: bytes) -> bool:
        """Adds data that completes no event; returns whether it belongs to such a body.

        Raises:
            ReplicaLost: The event or the body has no end.
        """
        self.unfinished_bytes += len(data)
        if self.unfinished_bytes > MAX_EVENT_BYTES:
            raise make_replica_lost("it sent an event without an end")
        if self.value is not None:
            self.value += data
        elif not self.has_data and (start := data.lstrip(b"\xef\xbb\xbf \t\r\n")):
            self.has_data = True
            if start.startswith((b"{", b"[")):
                self.value = bytearray(start)
        return self.value is not None

    def on_events(self) -> None:
        """Notes that events have come."""
        self.has_data, self.unfinished_bytes = True, 0
