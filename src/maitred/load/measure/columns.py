"""Columns of requests, with packed gaps: how a result file holds a hundred thousand answers.

A file with one object per request is slow to read. A file with one list per field is fast to read, because each list
becomes an array in one step. The gaps are by far the most numbers, so they are stored as bytes instead of text.
"""

import base64
import binascii
import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import InvalidRequest
from maitred.load.measure.record import RequestRecord, UserOutcome

MOST_GAP_US = 2**32 - 1
"""Longest gap that can be stored, 71 minutes. A longer gap is stored as this value."""


class RequestColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Columns with every request of a run: one list per field, in the order in which they were due.

    Times are seconds since the start of the run, to the microsecond; None: the event did not happen. `first_s`,
    `last_s` and `pieces` describe the pieces of text that arrived; all other fields are those of `RequestRecord`.
    """

    session: list[int]
    turn: list[int]
    tenant: list[str]
    intended_s: list[float]
    late_s: list[float]
    sent_s: list[float | None]
    headers_s: list[float | None]
    first_s: list[float | None]
    last_s: list[float | None]
    ended_s: list[float | None]
    pieces: list[int]
    asked_tokens: list[int]
    prompt_tokens: list[int]
    cached_tokens: list[int]
    output_tokens: list[int]
    attempts: list[int]
    status: list[int]
    finish_reason: list[str]
    outcome: list[UserOutcome]
    error: list[str]

    def __len__(self) -> int:
        return len(self.session)

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> "RequestColumns":
        """Makes the columns of some records."""
        return cls(
            session=[record.session for record in records],
            turn=[record.turn for record in records],
            tenant=[record.tenant for record in records],
            intended_s=[round(record.intended_s, 6) for record in records],
            late_s=[round(record.late_s, 6) for record in records],
            sent_s=_times(record.sent_s for record in records),
            headers_s=_times(record.headers_s for record in records),
            first_s=_times(record.arrivals_s[0] if record.arrivals_s else math.nan for record in records),
            last_s=_times(record.arrivals_s[-1] if record.arrivals_s else math.nan for record in records),
            ended_s=_times(record.ended_s for record in records),
            pieces=[len(record.arrivals_s) for record in records],
            asked_tokens=[record.asked_tokens for record in records],
            prompt_tokens=[record.prompt_tokens for record in records],
            cached_tokens=[record.cached_tokens for record in records],
            output_tokens=[record.output_tokens for record in records],
            attempts=[record.attempts for record in records],
            status=[record.status for record in records],
            finish_reason=[record.finish_reason for record in records],
            outcome=[record.outcome for record in records],
            error=[record.error for record in records],
        )

    def array(self, name: str) -> NDArray[Any]:
        """Returns one field as an array: floats with NaN for None, integers, or text.

        Raises:
            KeyError: There is no such field.
        """
        if name not in self.__struct_fields__:
            raise KeyError(name)
        values = getattr(self, name)
        if name.endswith("_s"):
            return np.array(values, dtype=np.float64)
        return np.array(values, dtype=object if name in TEXT else np.int64)

    def faults(self) -> str:
        """Returns why the columns do not fit each other, in a few words; empty: they fit."""
        lengths = {len(getattr(self, name)) for name in self.__struct_fields__}
        return "" if len(lengths) == 1 else f"its columns have different lengths, {min(lengths)} to {max(lengths)}"


TEXT = frozenset({"tenant", "finish_reason", "outcome", "error"})
"""Fields that hold text."""


def pack_gaps(records: Iterable[RequestRecord]) -> str:
    """Packs the gaps of all answers in order: ``base64(zlib(little-endian uint32 µs))``.

    Each time is rounded to the microsecond before the gap is computed, so that the gaps add up to ``last_s - first_s``.
    """
    gaps = [np.diff(np.rint(np.array(record.arrivals_s) * 1e6)) for record in records if len(record.arrivals_s) > 1]
    flat = np.concatenate(gaps) if gaps else np.empty(0)
    return base64.b64encode(zlib.compress(np.clip(flat, 0, MOST_GAP_US).astype("<u4").tobytes(), 6)).decode()


def unpack_gaps(packed: str) -> NDArray[np.uint32]:
    """Returns the gaps that `pack_gaps` packed, in microseconds.

    Raises:
        InvalidRequest: The text was not made by `pack_gaps`.
    """
    try:
        flat = zlib.decompress(base64.b64decode(packed, validate=True))
        return np.frombuffer(flat, dtype="<u4")
    except (binascii.Error, zlib.error, ValueError):
        raise InvalidRequest("The result file's `gaps` are damaged. Run the test again.") from None


def _times(values: Iterable[float]) -> list[float | None]:
    return [None if math.isnan(value) else round(value, 6) for value in values]
