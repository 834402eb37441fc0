"""How long loads took, kept in a file from one run of the gateway to the next.

A guess from the size of a model's files is wrong by whatever the machine is slower or faster than the one that the
guess was made on, and the first callers after a start are told it. So each load is written down, as few bytes as a
load is long.
"""

import json
import logging
import os
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger(__name__)


class LoadTimes:
    """What is expected of the next load of each model.

    Args:
        file: Where it is kept. What cannot be read there is forgotten, and what cannot be written is kept until the
            end of this run: a prediction is not worth more.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: dict[str, float] = {}
        with suppress(OSError, ValueError):
            known = json.loads(file.read_bytes())
            if isinstance(known, dict):
                self._seconds = {
                    model: float(seconds)
                    for model, seconds in known.items()
                    if isinstance(seconds, int | float) and 0 < seconds < float("inf")
                }

    def load_time(self, model: Path) -> float | None:
        """Seconds that the next load of the model in this folder should take; None: it was never loaded."""
        return self._seconds.get(str(model.resolve()))

    def learn(self, model: Path, seconds: float) -> None:
        """Keeps what is expected now."""
        self._seconds[str(model.resolve())] = round(seconds, 3)
        beside = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(self._seconds, indent=1, sort_keys=True), encoding="utf-8")
            beside.replace(self._file)
        except OSError as error:
            _log.warning("The time of a load could not be written to %s: %s", self._file, error)
