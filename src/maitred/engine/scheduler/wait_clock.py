"""Why those wait who wait, told without touching any of them.

Ten thousand waiting sequences cannot each keep an account in every step. But at any time there is one reason why nobody
(more) is admitted, the same for all: no slot, no blocks, or no room in the step. The clock adds up the time by reason;
a sequence remembers how the clock stood when it came, and the difference is its account.

What differs between sequences is whose turn it is. From the moment that somebody who came later was admitted first, a
sequence waits because others are owed service. For this the clock keeps when each arrival was first overtaken: the
records of the latest arrival that was admitted so far.
"""

from bisect import bisect_right
from dataclasses import dataclass

from maitred.core.request import WaitCause

_RECORDS = 4096


@dataclass(frozen=True, slots=True)
class ClockMark:
    """How the clock stood when somebody came."""

    at_s: float
    totals_s: dict[WaitCause, float]


class WaitClock:
    """Time by the reason for which nobody was admitted.

    Attributes:
        cause: The reason now. Whoever is not admitted waits for the step under way, if for nothing else.
    """

    def __init__(self) -> None:
        self.cause = WaitCause.PREFILL_BUDGET
        self._now_s = 0.0
        self._totals_s: dict[WaitCause, float] = {}
        self._latest: list[int] = []
        """Rising keys, each the latest arrival that was admitted by then..."""
        self._overtakes: list[ClockMark] = []
        """...and when."""

    def advance(self, now_s: float) -> None:
        """Advances the clock; the time since the last call passed for the cause of then."""
        if now_s > self._now_s:
            # A new dictionary each time: arrivals keep the old ones.
            self._totals_s = {**self._totals_s, self.cause: self._totals_s.get(self.cause, 0.0) + now_s - self._now_s}
            self._now_s = now_s

    def arrival(self) -> ClockMark:
        """To be kept by whoever comes now."""
        return ClockMark(self._now_s, self._totals_s)

    def on_admit(self, key: int, arrival: ClockMark) -> dict[str, float]:
        """Ends the wait of a sequence, and returns its seconds by cause.

        Args:
            key: Of whom; keys rise with arrival.
            arrival: From when it came.
        """
        position = bisect_right(self._latest, key)
        if position == len(self._latest):
            until = self.arrival()
            self._latest.append(key)
            self._overtakes.append(until)
            if len(self._latest) > _RECORDS:
                # Who is overtaken between two records counts from the later one: a little too kind to us, and rare.
                self._latest, self._overtakes = self._latest[1::2], self._overtakes[1::2]
        else:
            until = self._overtakes[position]
            if until.at_s < arrival.at_s:  # it was away meanwhile
                until = arrival
        waited = {cause.value: total_s - arrival.totals_s.get(cause, 0.0) for cause, total_s in until.totals_s.items()}
        waited[WaitCause.TENANT_SHARE.value] = self._now_s - until.at_s
        return {cause: seconds for cause, seconds in waited.items() if seconds > 0}
