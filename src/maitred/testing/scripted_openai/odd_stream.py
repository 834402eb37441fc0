"""Stream with faults: its sends and their times, and the ending of its connection."""

import random
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from maitred.testing.scripted_openai.script import FaultKind, ScriptedFault
from maitred.wire.sse import DONE, encode_comment, encode_event

BUNCH_EVENTS = 4
SPLIT_GAP_S = 0.001
_DRIPS = 1000


class StreamEnding(Enum):
    """Ending of a connection after the last byte."""

    KEEP = auto()
    CLOSE = auto()
    RESET = auto()
    STALL = auto()
    """The connection stays open, and nothing more is sent."""


@dataclass(slots=True)
class TimedSend:
    """Timed send: its bytes, the time since the send before, and the number of events it completes."""

    gap_s: float
    data: bytes
    events: int


class OddStream:
    """Sends of one stream, which faults change one after the other.

    Args:
        sends: Sends of the stream, one per event.
        closing: Bytes that follow directly after the last event.
    """

    def __init__(self, sends: list[TimedSend], closing: bytes) -> None:
        sends[-1].data += closing
        self.sends = sends
        self.ends_body = True
        self.ending = StreamEnding.KEEP
        self.end = "complete"
        self._closing = closing

    def apply(self, fault: ScriptedFault, rng: random.Random) -> None:
        """Applies a fault to the stream."""
        after = min(fault.after, len(self.sends))
        match fault.kind:
            case FaultKind.GARBAGE | FaultKind.EVENT:
                data = b"{oops" if fault.kind is FaultKind.GARBAGE else fault.text.encode()
                self.sends.insert(min(after, len(self.sends) - 1), TimedSend(0.0, encode_event(data), 0))
                self.end = fault.kind
            case FaultKind.STALL if fault.for_s is not None:
                self.sends[min(after, len(self.sends) - 1)].gap_s += fault.for_s
            case FaultKind.ERROR_EVENT:
                error = encode_event(msgspec.json.encode(error_object("The script wants an error here.", 500)))
                gap_s = self.sends[after].gap_s if after < len(self.sends) else 0.0
                self._end(after, fault.kind)
                self.sends.append(TimedSend(gap_s, error, 0))
            case FaultKind.STALL:
                self._end(after, fault.kind, StreamEnding.STALL)
            case FaultKind.CUT:
                self._end(after, fault.kind, StreamEnding.CLOSE)
            case FaultKind.RESET:
                self._end(after, fault.kind, StreamEnding.RESET)
            case FaultKind.HALF_EVENT:
                half = self.sends[min(after, len(self.sends) - 1)].data
                self._end(after, fault.kind)
                self.sends.append(TimedSend(0.0, half[: len(half) // 2], 0))
            case FaultKind.SHORT_LENGTH:
                self._end(after, fault.kind, StreamEnding.CLOSE)
            case FaultKind.DRIP:
                self._end(after, fault.kind, StreamEnding.STALL)
                self.sends += [TimedSend(fault.for_s or 0.05, encode_comment("drip"), 0) for _ in range(_DRIPS)]
            case FaultKind.TWICE if after:
                self.sends.insert(after, TimedSend(0.0, self.sends[after - 1].data, 0))
                self.end = fault.kind
            case FaultKind.TWICE | FaultKind.NO_USAGE:
                self.end = fault.kind
            case FaultKind.NO_DONE:
                whole = after == len(self.sends)
                self._end(after, fault.kind)
                if whole:
                    self.sends[-1].data += self._closing.removesuffix(DONE)
            case FaultKind.NO_END:
                self.ends_body, self.ending, self.end = False, StreamEnding.CLOSE, fault.kind
            case FaultKind.BUNCHED:
                bunches = [self.sends[at : at + BUNCH_EVENTS] for at in range(0, len(self.sends), BUNCH_EVENTS)]
                self.sends = [
                    TimedSend(
                        sum(s.gap_s for s in bunch), b"".join(s.data for s in bunch), sum(s.events for s in bunch)
                    )
                    for bunch in bunches
                ]
            case FaultKind.PINGS:
                ping = encode_comment("ping")
                self.sends = [
                    half
                    for send in self.sends
                    for half in (TimedSend(send.gap_s / 2, ping, 0), TimedSend(send.gap_s / 2, send.data, send.events))
                ]
            case FaultKind.CRLF:
                for send in self.sends:
                    send.data = send.data.replace(b"\n", b"\r\n")
            case FaultKind.SPLIT:
                self.sends = [piece for send in self.sends for piece in _split(send, rng)]
            case _:
                raise AssertionError(f"{fault.kind} has no stream")

    def _end(self, after: int, kind: FaultKind, ending: StreamEnding = StreamEnding.KEEP) -> None:
        """Cuts the stream after a number of events, without the regular end."""
        if after == len(self.sends) and after:
            self.sends[-1].data = self.sends[-1].data.removesuffix(self._closing)
        del self.sends[after:]
        self.ends_body = ending is StreamEnding.KEEP
        self.ending, self.end = ending, kind


def error_object(message: str, status: int, param: str | None = None) -> dict[str, object]:
    """Makes an error in the API's format."""
    kind = "invalid_request_error" if status == 400 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def _split(send: TimedSend, rng: random.Random) -> list[TimedSend]:
    cuts = sorted(rng.sample(range(1, len(send.data)), 2))
    pieces = [send.data[: cuts[0]], send.data[cuts[0] : cuts[1]], send.data[cuts[1] :]]
    gaps_s = (send.gap_s, SPLIT_GAP_S, SPLIT_GAP_S)
    return [
        TimedSend(gap_s, piece, send.events if last else 0)
        for gap_s, piece, last in zip(gaps_s, pieces, (False, False, True), strict=True)
    ]
