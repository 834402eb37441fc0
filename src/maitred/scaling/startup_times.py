"""Start-up times of replicas by the kind of start, from measured starts."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from enum import StrEnum

_KEPT = 32
"""Measurements that are kept of each kind."""
_UNKNOWN_S = 120.0
"""Seconds of a start of which nothing is known."""
_OVERDUE_SHARE, _LATE_SHARE = 0.1, 0.5
"""Estimated rest of an overdue start: a part of its usual time plus a part of its delay, whose cause may go on."""


class StartKind(StrEnum):
    """Kind of a start: what is there already when a replica begins to start. The slowest comes first."""

    COLD = "cold"
    """Nothing: the machine or the image must come first."""
    IMAGE_PRESENT = "image_present"
    """The machine runs and has the program; the weights must be fetched."""
    WEIGHTS_CACHED = "weights_cached"
    """The weights are on the machine's disk or in its memory."""
    WARM_PROCESS = "warm_process"
    """A process runs without weights."""
    ASLEEP = "asleep"
    """A replica sleeps: its process has everything but the memory of the accelerator."""


_FASTEST_FIRST = tuple(reversed(StartKind))


class StartupTimes:
    """Durations of the last starts of each kind, and their quantiles.

    A kind without measurements has the guess of its owner, and otherwise the times of the next slower kind.

    Args:
        guesses: Expected seconds of a start by kind, before there are measurements.
    """

    def __init__(self, guesses: Mapping[StartKind, float]) -> None:
        self._guesses = dict(guesses)
        self._measured: dict[StartKind, deque[float]] = {}
        self._sorted: dict[StartKind, list[float]] = {}

    def observe(self, kind: StartKind, seconds: float) -> None:
        """Adds the duration of a complete start: from the order to the first request that it could serve."""
        measured = self._measured.setdefault(kind, deque(maxlen=_KEPT))
        measured.append(seconds)
        self._sorted[kind] = sorted(measured)

    def quantile(self, kind: StartKind, q: float) -> float:
        """Returns the seconds within which a share `q` of the starts of this kind is complete.

        With few measurements it is the longest of them.
        """
        for slower in _FASTEST_FIRST[_FASTEST_FIRST.index(kind) :]:
            if times := self._sorted.get(slower):
                return times[min(len(times) - 1, math.ceil(q * (len(times) + 1)) - 1)] if q > 0 else times[0]
            if (guess_s := self._guesses.get(slower)) is not None:
                return guess_s
        return _UNKNOWN_S

    @property
    def measured(self) -> Mapping[StartKind, Sequence[float]]:
        """The measurements that are kept, the oldest of each kind first."""
        return {kind: [*times] for kind, times in self._measured.items()}

    def count(self, kind: StartKind) -> int:
        """Returns the number of measurements that are kept of this kind."""
        return len(self._measured.get(kind, ()))


def remaining_s(usual_s: float, elapsed_s: float) -> float:
    """Returns the estimated seconds that are left of a start after so many; `usual_s` is its usual duration."""
    late_s = elapsed_s - usual_s
    return max(-late_s, _OVERDUE_SHARE * usual_s + _LATE_SHARE * max(0.0, late_s))
