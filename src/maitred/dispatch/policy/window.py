"""How many requests a replica gets at one time that does not say what it has left: a window, learnt from its TTFT.

A server that queues in itself hides its queue in its time to first token. While nothing queues, the TTFT of a request
stays near the least that was seen lately; once it grows beyond that, further requests only wait over there instead of
here, where they would wait in fair order. So the window follows the gradient of the two, as TCP Vegas and the gradient
limits of Netflix' concurrency-limits do::

    window <- window * clamp(tolerance * least / ttft, 1/2, 1) + sqrt(window)

smoothed, and grown only while it is what limits. What the least is may change with the load, and cannot be seen while
something queues. So from time to time the window is halved for as many answers as it holds, and the least of these is
the new one (as BBR probes for the round trip). A refusal (429, 503) or an error halves the window at once: additive
increase, multiplicative decrease.
"""

import math

TOLERANCE = 1.5
"""A TTFT of so many times the least one is still no sign of a queue: prompts differ, and a batch costs something."""
_LEAST_TTFT_S = 0.02
"""What is faster counts as this: such times differ by how busy our own event loop is, and say nothing of a queue."""
_SMOOTHING = 0.2
_PROBE_EVERY = 300
"""Answers between two looks at the least TTFT."""


class Window:
    """Outstanding requests that a replica may have.

    Args:
        first: To begin with.
        least: Never less.
        most: Never more.
    """

    def __init__(self, first: float = 8.0, least: float = 1.0, most: float = 8192.0) -> None:
        self._size = min(max(first, least), most)
        self._least = least
        self._most = most
        self._fastest_s = math.inf
        self._until_probe = _PROBE_EVERY
        self._probing = 0
        """Answers that the probe still takes; the first of them were sent before it."""
        self._probed_s = math.inf

    @property
    def size(self) -> int:
        """Requests, in whole ones."""
        return max(int(self._least), int(self._size) // 2) if self._probing else int(self._size)

    def first_token(self, ttft_s: float, outstanding: int) -> None:
        """The first token of a request came.

        Args:
            ttft_s: After it was sent to the replica; divide by the length of the prompt if these differ much.
            outstanding: Requests at the replica, this one included.
        """
        ttft_s = max(ttft_s, _LEAST_TTFT_S)
        if self._probing:
            self._probe(ttft_s)
            return
        self._fastest_s = min(self._fastest_s, ttft_s)
        self._until_probe -= 1
        if self._until_probe <= 0:
            self._probing = max(4, int(self._size))
            self._probed_s = math.inf
        gradient = min(1.0, max(0.5, TOLERANCE * self._fastest_s / ttft_s))
        wanted = self._size * gradient + math.sqrt(self._size)
        if wanted > self._size and outstanding < self._size / 2:
            return  # it does not show what more would do
        self._size = self._within(self._size + _SMOOTHING * (wanted - self._size))

    def _probe(self, ttft_s: float) -> None:
        self._probing -= 1
        self._probed_s = min(self._probed_s, ttft_s)
        if not self._probing:
            self._fastest_s = self._probed_s
            self._until_probe = _PROBE_EVERY

    def refused(self) -> None:
        """The replica had no room, or failed."""
        self._size = self._within(self._size / 2)

    def _within(self, size: float) -> float:
        return min(max(size, self._least), self._most)
