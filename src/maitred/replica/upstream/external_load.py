"""What a server says that it has to do for others, and how old that is.

A page of metrics counts our requests too, as they were when it was read, and we know better how many of them are left
now. So what is kept of it is only what others had there.
"""

from maitred.core.replica import ExternalLoad
from maitred.replica.upstream.gauges import ServerLoad

_NEVER_S = float("-inf")


class ExternalLoadTracker:
    """Follows one server's pages.

    A page that stays the same while what we have there changes is no word: whatever serves it has stopped looking.

    Args:
        every_s: Between two looks; nothing is late before that.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._heard_s = _NEVER_S
        self._last: tuple[float | None, float | None] = (None, None)
        self._ours = 0
        self._requests = self._waiting = 0.0

    def heard(self, load: ServerLoad, ours: int, now_s: float) -> None:
        """A page was read.

        Args:
            load: What it says; nothing at all is no word either.
            ours: Our own requests that were open there.
            now_s: Now.
        """
        said = (load.running, load.waiting)
        if said == (None, None) or (said == self._last and ours != self._ours):
            return
        self._heard_s, self._last, self._ours = now_s, said, ours
        waiting = load.waiting or 0.0
        self._requests = max(0.0, (load.running or 0.0) + waiting - ours)
        self._waiting = min(waiting, self._requests)

    def at(self, now_s: float) -> ExternalLoad:
        """What it is known to have of others."""
        return ExternalLoad(self._requests, self._waiting, max(0.0, now_s - self._heard_s - self._every_s))
