"""Encodes errors of `maitred.core.errors` that travel from one process of a gateway to another."""

from collections.abc import Iterator

import msgspec

from maitred.core.counters import CounterState
from maitred.core.errors import ContextLengthExceeded, LimitReached, MaitredError, Overloaded
from maitred.core.flow import QueuePosition


class EncodedLimit(msgspec.Struct, frozen=True, array_like=True):
    """Fields of `LimitReached` except its message."""

    subject: str
    limit: str
    value: int
    reading: CounterState


class EncodedError(msgspec.Struct, frozen=True, array_like=True):
    """Encoded error: the name of its class, and all of its fields."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    place: QueuePosition | None = None
    limit: EncodedLimit | None = None
    context: tuple[int, int, int | None] | None = None
    """Window, prompt tokens and `max_tokens` of a `ContextLengthExceeded`."""


def encode_error(error: MaitredError) -> EncodedError:
    """Encodes an error as a struct."""
    limit = None
    if isinstance(error, LimitReached):
        limit = EncodedLimit(error.subject, error.limit, error.value, error.counter_state)
    position = error.position if isinstance(error, Overloaded) else None
    context = None
    if isinstance(error, ContextLengthExceeded):
        context = error.window, error.prompt_tokens, error.max_tokens
    return EncodedError(
        kind=type(error).__name__,
        message=error.message,
        param=error.param,
        retry_after_s=error.retry_after_s,
        place=position,
        limit=limit,
        context=context,
    )


def decode_error(encoded: EncodedError) -> MaitredError:
    """Decodes an error; an error of an unknown class becomes a `MaitredError`."""
    kind = _ERROR_CLASSES.get(encoded.kind, MaitredError)
    if issubclass(kind, LimitReached) and (limit := encoded.limit) is not None:
        return kind(
            encoded.message,
            subject=limit.subject,
            limit=limit.limit,
            value=limit.value,
            reading=limit.reading,
            retry_after_s=encoded.retry_after_s,
        )
    if issubclass(kind, ContextLengthExceeded) and encoded.context is not None:
        window, prompt_tokens, max_tokens = encoded.context
        return kind(
            encoded.message,
            param=encoded.param,
            retry_after_s=encoded.retry_after_s,
            window=window,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
        )
    if issubclass(kind, Overloaded):
        return kind(encoded.message, param=encoded.param, retry_after_s=encoded.retry_after_s, position=encoded.place)
    return kind(encoded.message, param=encoded.param, retry_after_s=encoded.retry_after_s)


def _with_subclasses(kind: type[MaitredError]) -> Iterator[type[MaitredError]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _with_subclasses(subclass)


_ERROR_CLASSES = {kind.__name__: kind for kind in _with_subclasses(MaitredError)}
