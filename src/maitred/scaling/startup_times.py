"""Start-up times of replicas by the kind of start, from measured starts."""

from collections.abc import Mapping
from enum import StrEnum


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


class StartupTimes:
    """Durations of the last starts of each kind, and their quantiles.

    A kind without measurements has the guess of its owner, and otherwise the times of the next slower kind.

    Args:
        guesses: Expected seconds of a start by kind, before there are measurements.
    """

    def __init__(self, guesses: Mapping[StartKind, float]) -> None:
        raise NotImplementedError

    def observe(self, kind: StartKind, seconds: float) -> None:
        """Adds the duration of a complete start: from the order to the first request that it could serve."""
        raise NotImplementedError

    def quantile(self, kind: StartKind, q: float) -> float:
        """Returns the seconds within which a share `q` of the starts of this kind is complete."""
        raise NotImplementedError

    def count(self, kind: StartKind) -> int:
        """Returns the number of measurements that are kept of this kind."""
        raise NotImplementedError
