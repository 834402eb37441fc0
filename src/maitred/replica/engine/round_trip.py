"""Round-trip time of the link to one engine, from pings and their answers."""

from collections import deque

_KEPT = 16
"""Number of the last round trips that count: those of a little more than a minute."""


class RoundTrip:
    """Round-trip time of one connection: the shortest of the last measured ones.

    An engine reads its messages between two steps, so most round trips to a busy engine are longer than the way there
    and back. The shortest one is closest to the network's part, and a route that has become longer is noticed when the
    earlier values are gone.

    Attributes:
        seconds: Round-trip time in seconds; None: none has been measured.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._measured_s: deque[float] = deque(maxlen=_KEPT)
        self._number = 0
        self._sent_s: float | None = None
        """When the last ping was sent; None: it has been answered."""

    def on_ping(self, now_s: float) -> int:
        """Notes that a ping is sent and returns its number. An earlier ping that has no answer yet is forgotten."""
        self._number += 1
        self._sent_s = now_s
        return self._number

    def on_pong(self, number: int, now_s: float) -> None:
        """Notes the answer to a ping; an answer to an earlier one does not count."""
        if number == self._number and self._sent_s is not None:
            self._measured_s.append(max(0.0, now_s - self._sent_s))
            self.seconds = min(self._measured_s)
            self._sent_s = None
