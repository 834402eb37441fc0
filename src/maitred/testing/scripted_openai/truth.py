"""Record of what the server did: one JSON object, written at its end or by ``GET /log``.

The times are of the machine's monotonic clock (``time.monotonic()``, and on Linux ``time.perf_counter()``), in seconds,
so a client on the same machine compares them with its own. The times of all sends are in JSON the base64 of
little-endian 64-bit floats; `RequestTruth` unpacks them.
"""

import sys
from array import array
from collections.abc import Iterable
from pathlib import Path

import msgspec

FORMAT = "maitred-scripted-openai/1"


class SendLateness(msgspec.Struct, kw_only=True):
    """How late sends were against the script, in seconds: nearest rank."""

    count: int
    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0

    @classmethod
    def of(cls, values_s: Iterable[float]) -> "SendLateness":
        """The quantiles of these."""
        ordered = sorted(values_s)
        if not ordered:
            return cls(count=0)
        p50_s, p90_s, p99_s = (ordered[int(len(ordered) * share)] for share in (0.50, 0.90, 0.99))
        return cls(count=len(ordered), p50_s=p50_s, p90_s=p90_s, p99_s=p99_s, max_s=ordered[-1])


class RequestTruth(msgspec.Struct, kw_only=True):
    """Record of one request.

    Attributes:
        number: Counts up from 0 in the order of receipt.
        received_s: When its last byte was read.
        started_s: When its turn came; later than `received_s` only with `max_concurrent`. None: it never came.
        ended_s: When its last byte had been handed to the system, or when it was found that the client had left.
        end: How it ended: ``complete``, the kind of its last fault, ``client_left`` or ``open``.
        status: Of the response; 0: none.
        stream: Whether the answer was streamed.
        user: The request's own ``user``.
        prompt_tokens, answer_tokens: As reported in its usage.
        due: Times at which sends were due.
        sent: Times at which they were done: just before the call that took their last byte.
        events_per_send: Tokens' events in each send, where it is not one in each.
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
        """When each event was due; an event that needed several sends, when the last of them was."""
        return self._of_events(_unpack(self.due))

    def sent_s(self) -> "array[float]":
        """When each event was whole on its way."""
        return self._of_events(_unpack(self.sent))

    def _of_events(self, times_s: "array[float]") -> "array[float]":
        if self.events_per_send is None:
            return times_s
        pairs = zip(times_s, self.events_per_send, strict=False)  # a send that was not done has no time
        return array("d", (time_s for time_s, events in pairs for _ in range(events)))


class ServedRecord(msgspec.Struct, kw_only=True):
    """All that a server did.

    Attributes:
        unix_minus_monotonic_s: What to add to a time for the wall clock's.
        cpu_seconds: Processor time of the server.
        lateness: Of all sends.
    """

    requests: list[RequestTruth]
    unix_minus_monotonic_s: float
    cpu_seconds: float
    lateness: SendLateness
    format: str = FORMAT

    @classmethod
    def load(cls, source: Path | bytes) -> "ServedRecord":
        """From the file or from the answer to ``GET /log``."""
        return msgspec.json.decode(source.read_bytes() if isinstance(source, Path) else source, type=cls)

    @property
    def events(self) -> int:
        """Events with text that were sent."""
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
