"""What a server says that it has to do for others, and how old that is.

A page of metrics counts our requests too, as they were when it was read, and we know better how many of them are left
now. So what is kept of it is only what others had there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from maitred.core.replica import ExternalLoad
from maitred.replica.upstream.dialects import LoadGauges

_NEVER_S = float("-inf")


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What a server said last of its own load; None where it does not say."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    """Of its KV cache, from 0 to 1."""


class ExternalLoadTracker:
    """Follows one server's pages.

    A page that stays the same while what we have there changes is no word: whatever serves it has stopped looking.

    Args:
        every_s: Between two looks; nothing is late before that.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._reported_s = _NEVER_S
        self._last: tuple[float | None, float | None] = (None, None)
        self._ours = 0
        self._requests = self._waiting = 0.0

    def on_report(self, load: ServerLoad, ours: int, now_s: float) -> None:
        """A page was read.

        Args:
            load: What it says; nothing at all is no word either.
            ours: Our own requests that were open there.
            now_s: Now.
        """
        said = (load.running, load.waiting)
        if said == (None, None) or (said == self._last and ours != self._ours):
            return
        self._reported_s, self._last, self._ours = now_s, said, ours
        waiting = load.waiting or 0.0
        self._requests = max(0.0, (load.running or 0.0) + waiting - ours)
        self._waiting = min(waiting, self._requests)

    def at(self, now_s: float) -> ExternalLoad:
        """What it is known to have of others."""
        return ExternalLoad(self._requests, self._waiting, max(0.0, now_s - self._reported_s - self._every_s))


def load_in(text: str, gauges: LoadGauges) -> ServerLoad:
    """The load in a page of metrics.

    A gauge can occur several times, once for each engine in the server: requests add up, and of caches the fullest
    counts.
    """
    wanted = {gauges.running, gauges.waiting, *gauges.kv_usage}
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name not in wanted:
            continue
        try:
            # Behind the value there may be a time.
            value = float(line[len(name) :].rpartition("}")[2].split()[0])
        except (ValueError, IndexError):
            continue
        if 0 <= value < float("inf"):
            found.setdefault(name, []).append(value)
    return ServerLoad(
        _sum(found, gauges.running),
        _sum(found, gauges.waiting),
        next((max(found[name]) for name in gauges.kv_usage if name in found), None),
    )


def _sum(found: Mapping[str, list[float]], name: str) -> float | None:
    return sum(found[name]) if name in found else None
