"""The headers of one request."""

from collections.abc import Sequence

from maitred.core.errors import InvalidRequest
from maitred.wire.openai.faults import format_value


class Headers:
    """Looks up a header by its name, which is called like the function that it is to others.

    Args:
        pairs: As they came, with names in lower case. Of several with one name, the first counts.
    """

    __slots__ = ("_values",)

    def __init__(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        self._values = dict(reversed(pairs))

    def __call__(self, name: bytes) -> str | None:
        """The first value of a header (name in lower case); None where it was not sent."""
        value = self._values.get(name)
        return None if value is None else value.decode("latin-1")

    def have_any(self, names: frozenset[bytes]) -> bool:
        """Whether one of these was sent: most requests have none of ours, and need not be asked for each."""
        return not names.isdisjoint(self._values)


_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def wish_in(header: Headers, name: str) -> bool | None:
    """Returns what a yes-or-no header says; None where it is missing.

    Raises:
        InvalidRequest: It says neither yes nor no.
    """
    return None if header(name.encode()) is None else flag_in(header, name)


def flag_in(header: Headers, name: str) -> bool:
    """Whether the header says yes; one that is not there says no.

    Raises:
        InvalidRequest: It says neither.
    """
    value = header(name.encode())
    if value is None:
        return False
    flag = _FLAGS.get(value.strip().lower())
    if flag is None:
        raise InvalidRequest(f"{name} must be true or false; got {format_value(value)}.", param=name)
    return flag
