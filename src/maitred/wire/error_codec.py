"""Errors of our tree on their way from one process of a gateway to another."""

from collections.abc import Iterator

import msgspec

from maitred.core.counters import CounterState
from maitred.core.errors import LimitReached, MaitredError, Overloaded
from maitred.core.flow import QueuePosition


class WrittenLimit(msgspec.Struct, frozen=True, array_like=True):
    """What `LimitReached` says beside its message."""

    subject: str
    limit: str
    value: int
    reading: CounterState


class WrittenError(msgspec.Struct, frozen=True, array_like=True):
    """An error: its class by name, and all that it says."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    place: QueuePosition | None = None
    limit: WrittenLimit | None = None


def write_error(error: MaitredError) -> WrittenError:
    """The error, to be sent."""
    limit = None
    if isinstance(error, LimitReached):
        limit = WrittenLimit(error.subject, error.limit, error.value, error.reading)
    place = error.place if isinstance(error, Overloaded) else None
    return WrittenError(type(error).__name__, error.message, error.param, error.retry_after_s, place, limit)


def read_error(written: WrittenError) -> MaitredError:
    """The same error again; one of ours where its class is not known here."""
    kind = _KINDS.get(written.kind, MaitredError)
    if issubclass(kind, LimitReached) and (limit := written.limit) is not None:
        return kind(
            written.message,
            subject=limit.subject,
            limit=limit.limit,
            value=limit.value,
            reading=limit.reading,
            retry_after_s=written.retry_after_s,
        )
    if issubclass(kind, Overloaded):
        return kind(written.message, param=written.param, retry_after_s=written.retry_after_s, place=written.place)
    return kind(written.message, param=written.param, retry_after_s=written.retry_after_s)


def _below(kind: type[MaitredError]) -> Iterator[type[MaitredError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _below(each)


_KINDS = {kind.__name__: kind for kind in _below(MaitredError)}
