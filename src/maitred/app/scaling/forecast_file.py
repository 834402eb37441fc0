"""Forecast of a model's demand that outlives the gateway, in a file."""

import hashlib
import logging
from pathlib import Path

import msgspec

from maitred.core.clock import Clock
from maitred.scaling.forecast import DemandForecast
from maitred.scaling.forecast_snapshot import ForecastSnapshot
from maitred.store.location import write_file

_OLDEST_S = 14 * 86_400.0
"""An older forecast says nothing of the present demand."""

_log = logging.getLogger(__name__)


class KeptForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file."""

    pool: str
    at_s: float
    """Wall time."""
    snapshot: ForecastSnapshot


class ForecastFile:
    """File of the forecast of one model.

    Args:
        folder: Folder of the files; each pool has its own.
        pool: Name of the pool of its replicas.
        clock: The clock.
    """

    def __init__(self, folder: Path, pool: str, clock: Clock) -> None:
        self._file = folder / f"{hashlib.sha256(pool.encode()).hexdigest()[:16]}.msgpack"
        self._pool = pool
        self._clock = clock

    def read(self) -> DemandForecast:
        """Returns the forecast as it was. If that is too old or cannot be read, the log says it, and a new one begins.

        The time since then was not observed, which is not the same as no demand.
        """
        now_s = self._clock.monotonic_s()
        start_s = self._clock.wall_s() - now_s
        forecast = DemandForecast(start_s=start_s)
        try:
            kept = msgspec.msgpack.decode(self._file.read_bytes(), type=KeptForecast)
            age_s = self._clock.wall_s() - kept.at_s
            if kept.pool != self._pool or not 0 <= age_s <= _OLDEST_S:
                raise ValueError(f"it is {age_s:.0f} s old and that of {kept.pool}")
            forecast.restore(kept.snapshot, now_s)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, msgspec.DecodeError) as error:
            _log.warning("The forecast in %s cannot be used, so it is learnt anew: %s", self._file, error)
            return DemandForecast(start_s=start_s)
        return forecast

    def write(self, snapshot: ForecastSnapshot) -> None:
        """Writes a snapshot. What cannot be written is lost with this process, and the log says it."""
        kept = KeptForecast(pool=self._pool, at_s=self._clock.wall_s(), snapshot=snapshot)
        try:
            write_file(self._file, msgspec.msgpack.encode(kept))
        except OSError as error:
            _log.warning("The forecast could not be written to %s: %s", self._file, error)
