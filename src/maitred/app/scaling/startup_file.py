"""Start-up times of a model's replicas that outlive the gateway, in a file."""

import logging
from collections.abc import Mapping
from pathlib import Path

from maitred.scaling.startup_times import StartKind, StartupTimes
from maitred.store.location import read_object, write_object

_log = logging.getLogger(__name__)


class StoredStartupTimes(StartupTimes):
    """Start-up times that are kept in a file from one run of the gateway to the next.

    Args:
        file: The file; it has the times of several models. What cannot be read is forgotten, and what cannot be written
            is kept until the end of this run: a prediction is not worth more.
        model: The model, by what tells it from another one that is served from the same data folder at another time.
        guesses: See `StartupTimes`.
    """

    def __init__(self, file: Path, model: str, guesses: Mapping[StartKind, float]) -> None:
        super().__init__(guesses)
        self._file = file
        self._model = model
        for kind, times in _times_of(read_object(file).get(model)).items():
            for seconds in times:
                super().observe(kind, seconds)

    def observe(self, kind: StartKind, seconds: float) -> None:
        """Adds the duration of a complete start and writes the file."""
        super().observe(kind, round(seconds, 3))
        known = read_object(self._file) | {self._model: self.measured}
        try:
            write_object(self._file, known)
        except OSError as error:
            _log.warning("The time of a start could not be written to %s: %s", self._file, error)


def _times_of(known: object) -> dict[StartKind, list[float]]:
    """Returns the times that the file has of a model."""
    if not isinstance(known, dict):
        return {}
    return {
        StartKind(kind): [float(seconds) for seconds in times if _is_time(seconds)]
        for kind, times in known.items()
        if kind in list(StartKind) and isinstance(times, list)
    }


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")
