"""How long to wait before a dead engine is started again."""


class Backoff:
    """Doubles the wait with every early death, and forgives after a life that was long enough.

    An engine that dies once an hour is back at once; one that dies on every start does not keep the machine busy.

    Args:
        first_s: Wait after the first early death.
        most_s: The wait stops growing here.
        healthy_s: A life of at least this long starts the count anew.
    """

    def __init__(self, *, first_s: float = 0.2, most_s: float = 30.0, healthy_s: float = 60.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._healthy_s = healthy_s
        self._next_s = first_s

    def wait_s(self, lived_s: float) -> float:
        """The wait after a life of `lived_s` seconds."""
        if lived_s >= self._healthy_s:
            self._next_s = self._first_s
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._most_s)
        return wait_s
