"""The headers of one request."""

from collections.abc import Sequence


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
