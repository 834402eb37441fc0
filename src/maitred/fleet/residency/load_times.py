"""Load times of models, kept in a file from one run of the gateway to the next.

A guess from the size of a model's files is wrong by the ratio of this machine's speed to the speed of the machine on
which the guess was calibrated, and the first callers after a start would get this wrong wait. So each load time is
stored in a file; this costs a few bytes per load.
"""

import logging
from pathlib import Path

from maitred.store.location import read_object, write_object

_log = logging.getLogger(__name__)


class LoadTimes:
    """Expected time of the next load of each model.

    Args:
        file: File of the times. Times that cannot be read are forgotten, and times that cannot be written are kept
            until the end of this run: a prediction is not worth more.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds = {
            model: float(seconds)
            for model, seconds in read_object(file).items()
            if isinstance(seconds, int | float) and 0 < seconds < float("inf")
        }

    def expected_load_s(self, model: Path) -> float | None:
        """Returns the expected seconds of the next load from this folder; None: no load was recorded."""
        return self._seconds.get(str(model.resolve()))

    def record(self, model: Path, seconds: float) -> None:
        """Records the expected time of the next load and writes the file."""
        self._seconds[str(model.resolve())] = round(seconds, 3)
        try:
            write_object(self._file, self._seconds)
        except OSError as error:
            _log.warning("The time of a load could not be written to %s: %s", self._file, error)
