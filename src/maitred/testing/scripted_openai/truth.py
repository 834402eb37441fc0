"""Record of the server's work: one JSON object, written at its end or by ``GET /log``.

Times are in seconds of the machine's monotonic clock (``time.monotonic()``, and on Linux ``time.perf_counter()``), so a
client on the same machine can compare them with its own. In JSON, the times of all sends are base64 of little-endian
64-bit floats; `RequestTruth` unpacks them.
"""

import sys
from array import array
from collections.abc import Iterable
from pathlib import Path

import msgspec

FORMAT = "maitred-scripted-openai/1"


class SendLateness(msgspec.Struct, kw_only=True):
    """Lateness of sends compared with the script, in seconds: quantiles by nearest rank."""

    count: int
    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0

    @classmethod
    def of(cls, values_s: Iterable[float]) -> "SendLateness":
        """Computes the quantiles of some latenesses."""
        ordered = sorted(values_s)
        if not ordered:
            return cls(count=0)
        p50_s, p90_s, p99_s = (ordered[int(len(ordered) * share)] for share in (0.50, 0.90, 0.99))
        return cls(count=len(ordered), p50_s=p50_s, p90_s=p90_s, p99_s=p99_s, max_s=ordered[-1])


class RequestTruth(msgspec.Struct, kw_only=True):
    """Record of one request.

    Attributes:
        number: Number of the request, from 0 in the order of receipt.
        received_s: When its last byte was read.
        started_s: When its processing began; later than `received_s` only with `max_concurrent`. None: it never began.
        ended_s: When its last byte had been passed to the system, or when the client was found to have left.
        end: Ending of the request: ``complete``, the kind of its last fault, ``client_left`` or ``open``.
        status: Status of the response; 0: there was none.
        stream: Whether the answer was streamed.
        user: Field ``user`` of the request.
        prompt_tokens, answer_tokens: Counts in its reported usage.
        due: Times at which sends were due.
        sent: Times of the sends: just before the call that took their last byte.
        events_per_send: Number of token events in each send, if it is not one each.
    """

    number: int
    received_s: float
    started_s: float | None = None
    ended_s: float | None = None
    end: str = "open"
    status: int = 0
    stream: bool = False
    user: str = ""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    due: bytes = b""
    sent: bytes = b""
    events_per_send: list[int] | None = None

    def due_s(self) -> "array[float]":
        """Times at which events were due; for an event of several sends, that of the last send."""
        return self._of_events(_unpack(self.due))

    def sent_s(self) -> "array[float]":
        """Times at which events were completely sent."""
        return self._of_events(_unpack(self.sent))

    def _of_events(self, times_s: "array[float]") -> "array[float]":
        if self.events_per_send is None:
            return times_s
        pairs = zip(times_s, self.events_per_send, strict=False)  # a send that did not happen has no time
        return array("d", (time_s for time_s, events in pairs for _ in range(events)))


class ServedRecord(msgspec.Struct, kw_only=True):
    """Record of all that a server did.

    Attributes:
        unix_minus_monotonic_s: Wall time less monotonic time.
        cpu_seconds: Processor time of the server.
        lateness: Lateness of all sends.
    """

    requests: list[RequestTruth]
    unix_minus_monotonic_s: float
    cpu_seconds: float
    lateness: SendLateness
    format: str = FORMAT

    @classmethod
    def load(cls, source: Path | bytes) -> "ServedRecord":
        """Reads a record from a file or from the answer to ``GET /log``."""
        return msgspec.json.decode(source.read_bytes() if isinstance(source, Path) else source, type=cls)

    @property
    def events(self) -> int:
        """Number of events with text that were sent."""
        return sum(len(request.sent_s()) for request in self.requests)


def pack(times_s: "array[float]") -> bytes:
    """Packs times as little-endian 64-bit floats."""
    if sys.byteorder == "big":
        times_s = times_s[:]
        times_s.byteswap()
    return times_s.tobytes()


def _unpack(data: bytes) -> "array[float]":
    times_s = array("d", data)
    if sys.byteorder == "big":
        times_s.byteswap()
    return times_s
