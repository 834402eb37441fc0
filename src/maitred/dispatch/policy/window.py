"""How many requests a replica gets at one time that does not say what it has left: a window, learnt from its TTFT.

A server that queues in itself hides its queue in its time to first token. While nothing queues, the TTFT of a request
stays near the least that was seen lately; once it grows beyond that, further requests only wait over there instead of
here, where they would wait in fair order. So the window follows the gradient of the two, as TCP Vegas and the gradient
limits of Netflix' concurrency-limits do::

    window <- window * clamp(tolerance * least / ttft, 1/2, 1) + sqrt(window)

smoothed, and grown only while it is what limits. Until the first sign of a queue each first token is worth two requests
more, so twice as many are sent after every TTFT (TCP's slow start): a stream lasts much longer than its TTFT, and a
window that grew with the ends of streams would leave a large server idle for minutes.

A false alarm costs most where streams are long: a window that is full of them hears nothing until they end.

What the least is may change with the load, and cannot be seen while something queues. So after many late answers the
window is halved, and the least of the first answers beside half as many others is the new one (as BBR probes for the
round trip). Where nothing is late there is nothing to find out. A refusal (429, 503) or an error halves the window at
once: additive increase, multiplicative decrease.
"""

import math

TOLERANCE = 1.5
"""A TTFT of so many times the least one is still no sign of a queue: prompts differ, and a batch costs something."""
_LEAST_TTFT_S = 0.1
"""What is faster counts as this: nobody minds a queue so short, and such times differ by what else the machine does."""
_SMOOTHING = 0.2
_START = 2.0
"""Requests more for each first token."""
_LATE_IN_A_ROW = 2
"""What ends the start. One alone may have had a long prompt."""
_PROBE_AFTER = 300
"""Late answers between two looks at the least TTFT; ten times as many as the window holds, if that is more."""
_PROBE_WINDOWS = 10
_PROBED = 8
"""Answers of a probe."""


class ConcurrencyWindow:
    """Outstanding requests that a replica may have.

    Args:
        first: To begin with.
        least: Never less.
        most: Never more.

    Attributes:
        size: Requests, in whole ones.
    """

    def __init__(self, first: float = 8.0, least: float = 1.0, most: float = 8192.0) -> None:
        self._size = min(max(first, least), most)
        self._least = least
        self._most = most
        self._fastest_s = math.inf
        self._starting = True
        self._late_in_a_row = 0
        self._until_probe = _PROBE_AFTER
        self._probing = 0
        """Answers that the probe still takes."""
        self._probed_s = math.inf
        self.size = int(self._size)

    def widened_in_s(self, more: int) -> float | None:
        """How long it takes until it is so much wider, if nothing comes to queue meanwhile; 0 where nobody knows.

        None: something has queued before, so nobody expects that.
        """
        if not self._starting or self._probing:
            return None
        return math.log2(1.0 + more / self._size) * self._fastest_s if self._fastest_s < math.inf else 0.0

    def on_first_token(self, ttft_s: float, outstanding: int) -> None:
        """The first token of a request came.

        Args:
            ttft_s: After it was sent to the replica; divide by the length of the prompt if these differ much.
            outstanding: Requests at the replica, this one included.
        """
        if ttft_s < _LEAST_TTFT_S:
            ttft_s = _LEAST_TTFT_S
        if self._probing:
            if outstanding <= self.size:  # the window was full when it was halved
                self._probe(ttft_s)
            return
        if ttft_s < self._fastest_s:
            self._fastest_s = ttft_s
        if ttft_s > TOLERANCE * self._fastest_s:
            self._late(ttft_s, outstanding)
            return
        self._late_in_a_row = 0
        if outstanding < self._size / 2 or self._size == self._most:
            return  # it does not show what more would do, or there is no more
        step = _SMOOTHING * math.sqrt(self._size)
        self._resize(self._size + (max(_START, step) if self._starting else step))

    def _late(self, ttft_s: float, outstanding: int) -> None:
        """Notes a late answer: requests queue at the replica."""
        self._late_in_a_row += 1
        if self._late_in_a_row == _LATE_IN_A_ROW:
            self._starting = False
        gradient = max(0.5, TOLERANCE * self._fastest_s / ttft_s)
        step = self._size * (gradient - 1.0) + math.sqrt(self._size)
        self._until_probe -= 1
        if self._until_probe <= 0:
            self._probing, self._probed_s = _PROBED, math.inf
        shows = step <= 0.0 or outstanding >= self._size / 2
        self._resize(self._size + _SMOOTHING * step if shows else self._size)

    def _probe(self, ttft_s: float) -> None:
        self._probing -= 1
        self._probed_s = min(self._probed_s, ttft_s)
        if not self._probing:
            self._fastest_s = self._probed_s
            self._until_probe = max(_PROBE_AFTER, _PROBE_WINDOWS * int(self._size))
            self._resize(self._size)

    def on_rejection(self) -> None:
        """The replica had no room, or failed."""
        self._starting = False
        self._resize(self._size / 2)

    def _resize(self, size: float) -> None:
        self._size = min(max(size, self._least), self._most)
        self.size = max(int(self._least), int(self._size) // 2) if self._probing else int(self._size)
