"""Concurrency window of a replica that does not report its capacity, learnt from its TTFT.

The internal queue of a server only shows in its time to first token (TTFT). Without a queue, the TTFT stays near its
recent minimum; once it grows, further requests would only wait at the server instead of here, in fair order. So the
window follows the ratio of minimum to current TTFT, as TCP Vegas and the gradient limits of Netflix concurrency-limits
do::

    window <- window * clamp(tolerance * least / ttft, 1/2, 1) + sqrt(window)

The update is smoothed, and the window only grows while it limits the number of requests. Until the first sign of a
queue, each first token widens the window by two requests (slow start, as in TCP). Growth at the end of streams would
leave a large server idle for minutes, because a stream lasts much longer than its TTFT.

A false alarm is costly with long streams: a full window gets no new samples until one ends.

The minimum TTFT may change with the load, and it cannot be measured while requests queue. So after many late first
tokens the window is halved, and the minimum of the next samples is the new minimum (as BBR probes the round-trip time).
No probe is needed while nothing is late. A rejection (429, 503) or an error halves the window at once: additive
increase, multiplicative decrease.
"""

import math

TOLERANCE = 1.5
"""A TTFT up to this multiple of the minimum is no sign of a queue, because prompts and batches differ."""
_MIN_TTFT_S = 0.1
"""Shorter TTFTs count as this, because they vary with other work of the machine."""
_MIN_SIZE = 1.0
_MAX_SIZE = 8192.0
_SMOOTHING = 0.2
_SLOW_START_STEP = 2.0
"""Growth of the window per first token in slow start."""
_SLOW_START_END_COUNT = 2
"""Consecutive late first tokens that end slow start. A single one may have had a long prompt."""
_PROBE_INTERVAL = 300
"""Late first tokens between two probes; ten times the window size if that is more."""
_PROBE_INTERVAL_WINDOWS = 10
_PROBE_SAMPLES = 8
"""Number of samples of a probe."""


class ConcurrencyWindow:
    """Limit of outstanding requests at one replica.

    Args:
        initial: Initial size.

    Attributes:
        size: Current limit, an integer.
    """

    def __init__(self, initial: float = 8.0) -> None:
        self._size = initial
        self._min_ttft_s = math.inf
        self._in_slow_start = True
        self._late_in_a_row = 0
        self._until_probe = _PROBE_INTERVAL
        self._probe_samples_left = 0
        """Samples that the current probe still needs; 0: no probe."""
        self._probe_min_ttft_s = math.inf
        self.size = int(self._size)

    def widened_in_s(self, more: int) -> float | None:
        """Returns the seconds until the window grows by `more` in slow start; 0: unknown.

        None: slow start is over, so no such growth is expected.
        """
        if not self._in_slow_start or self._probe_samples_left:
            return None
        return math.log2(1.0 + more / self._size) * self._min_ttft_s if self._min_ttft_s < math.inf else 0.0

    def on_first_token(self, ttft_s: float, outstanding: int) -> None:
        """Updates the window from a measured time to first token.

        Args:
            ttft_s: Seconds from dispatch to first token; normalise by prompt length if prompts differ much.
            outstanding: Number of requests at the replica, including this one.
        """
        if ttft_s < _MIN_TTFT_S:
            ttft_s = _MIN_TTFT_S
        if self._probe_samples_left:
            if outstanding <= self.size:  # ignore samples of requests sent before the window was halved
                self._probe(ttft_s)
            return
        if ttft_s < self._min_ttft_s:
            self._min_ttft_s = ttft_s
        if ttft_s > TOLERANCE * self._min_ttft_s:
            self._on_late_token(ttft_s, outstanding)
            return
        self._late_in_a_row = 0
        if outstanding < self._size / 2 or self._size == _MAX_SIZE:
            return  # the window does not limit, or it has its maximum size
        step = _SMOOTHING * math.sqrt(self._size)
        self._resize(self._size + (max(_SLOW_START_STEP, step) if self._in_slow_start else step))

    def _on_late_token(self, ttft_s: float, outstanding: int) -> None:
        """Shrinks the window after a late first token."""
        self._late_in_a_row += 1
        if self._late_in_a_row == _SLOW_START_END_COUNT:
            self._in_slow_start = False
        gradient = max(0.5, TOLERANCE * self._min_ttft_s / ttft_s)
        step = self._size * (gradient - 1.0) + math.sqrt(self._size)
        self._until_probe -= 1
        if self._until_probe <= 0:
            self._probe_samples_left, self._probe_min_ttft_s = _PROBE_SAMPLES, math.inf
        shows = step <= 0.0 or outstanding >= self._size / 2
        self._resize(self._size + _SMOOTHING * step if shows else self._size)

    def _probe(self, ttft_s: float) -> None:
        self._probe_samples_left -= 1
        self._probe_min_ttft_s = min(self._probe_min_ttft_s, ttft_s)
        if not self._probe_samples_left:
            self._min_ttft_s = self._probe_min_ttft_s
            self._until_probe = max(_PROBE_INTERVAL, _PROBE_INTERVAL_WINDOWS * int(self._size))
            self._resize(self._size)

    def on_rejection(self) -> None:
        """Halves the window after a rejection or an error."""
        self._in_slow_start = False
        self._resize(self._size / 2)

    def _resize(self, size: float) -> None:
        self._size = min(max(size, _MIN_SIZE), _MAX_SIZE)
        self.size = max(int(_MIN_SIZE), int(self._size) // 2) if self._probe_samples_left else int(self._size)
