"""How long to wait before a dead engine is started again."""

from maitred.core.backoff import BackoffCeiling


class Backoff:
    """Doubles the wait with every early death, and forgives after a life that was long enough.

    An engine that dies once an hour is back at once; one that dies on every start does not keep the machine busy. There
    is no jitter: one supervisor starts one engine, so there is nobody to keep apart.

    Args:
        first_s: Wait after the first early death.
        most_s: The wait stops growing here.
        healthy_s: A life of at least this long starts the count anew.
    """

    def __init__(self, *, first_s: float = 0.2, most_s: float = 30.0, healthy_s: float = 60.0) -> None:
        self._ceiling = BackoffCeiling(first_s, most_s)
        self._healthy_s = healthy_s
        self._deaths = 0

    def wait_s(self, lived_s: float) -> float:
        """The wait after a life of `lived_s` seconds."""
        self._deaths = 1 if lived_s >= self._healthy_s else self._deaths + 1
        return self._ceiling.after(self._deaths)
