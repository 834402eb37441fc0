"""Outcomes of a scaler's predictions: what was predicted of the time to first token, and what was measured."""

import math
from collections import deque

from msgspec import Struct

_PERIOD_S = 60.0
_KEPT = 60
_MOST_TIMES = 4_096
"""Most times of a period that are kept; of more, every second, fourth, ... one is."""


class TTFTOutcome(Struct, frozen=True, kw_only=True):
    """Predicted and measured time to first token of one minute."""

    at_s: float
    """Wall time of its end."""
    predicted_s: float | None
    """Highest prediction of a decision in it, for 95 % of the requests; None: the capacity was not known."""
    measured_s: float | None
    """95th percentile of its first tokens; None: there were none."""
    requests: int


class TTFTRecorder:
    """Predicted and measured times to first token of the last hour.

    Args:
        now_s: The present monotonic time.

    Attributes:
        last: The outcomes, oldest first.
    """

    def __init__(self, now_s: float) -> None:
        self.last: deque[TTFTOutcome] = deque(maxlen=_KEPT)
        self._ends_s = now_s + _PERIOD_S
        self._times: list[float] = []
        self._stride = 1
        self._requests = 0
        self._predicted_s: float | None = None

    def on_first_token(self, after_s: float) -> None:
        """Records the time to first token of a request."""
        if self._requests % self._stride == 0:
            self._times.append(after_s)
            if len(self._times) > _MOST_TIMES:
                self._times = self._times[::2]
                self._stride *= 2
        self._requests += 1

    def on_decision(self, ttft_s: float | None, now_s: float, wall_s: float) -> None:
        """Records the prediction of a decision; ends the period if it is over."""
        if now_s >= self._ends_s:
            times = sorted(self._times)
            measured_s = times[math.ceil(0.95 * len(times)) - 1] if times else None
            self.last.append(
                TTFTOutcome(at_s=wall_s, predicted_s=self._predicted_s, measured_s=measured_s, requests=self._requests)
            )
            self._ends_s = now_s + _PERIOD_S
            self._times, self._stride, self._requests, self._predicted_s = [], 1, 0, None
        if ttft_s is not None:
            self._predicted_s = max(ttft_s, self._predicted_s or 0.0)
