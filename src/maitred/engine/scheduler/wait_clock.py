"""Waiting times of sequences by cause, measured without work per waiting sequence.

Updating ten thousand waiting sequences in every step would be too slow. But at any time there is one reason why no
further sequence is admitted, and it is the same for all: no slot, no blocks, or no tokens left in the step. The clock
adds up the time by reason. A sequence stores the clock's state at its arrival, and the difference is its waiting time.

Only the order of service differs between sequences. As soon as a later arrival was admitted first, a sequence waits
because others are owed service. For this the clock stores when each arrival was first overtaken, as a list of records
of the latest admitted arrival.
"""

from bisect import bisect_right
from dataclasses import dataclass

from maitred.core.request import WaitCause

_RECORDS = 4096


@dataclass(frozen=True, slots=True)
class ClockMark:
    """State of the clock at the arrival of a sequence."""

    at_s: float
    totals_s: dict[WaitCause, float]


class WaitClock:
    """Clock of the time by the cause for which no sequence was admitted.

    Attributes:
        cause: Current cause. Without another cause, a sequence waits for the running step.
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
        """Advances the clock and adds the time since the last call to its current cause."""
        if now_s > self._now_s:
            # A new dictionary is made each time, because arrivals keep the old ones.
            self._totals_s = {**self._totals_s, self.cause: self._totals_s.get(self.cause, 0.0) + now_s - self._now_s}
            self._now_s = now_s

    def arrival(self) -> ClockMark:
        """Returns the mark that a sequence arriving now must keep."""
        return ClockMark(self._now_s, self._totals_s)

    def on_admit(self, key: int, arrival: ClockMark) -> dict[str, float]:
        """Ends the wait of a sequence, and returns its seconds by cause.

        Args:
            key: Key of the sequence; keys rise with arrival.
            arrival: Mark from the arrival of the sequence.
        """
        position = bisect_right(self._latest, key)
        if position == len(self._latest):
            until = self.arrival()
            self._latest.append(key)
            self._overtakes.append(until)
            if len(self._latest) > _RECORDS:
                # A sequence overtaken between two records counts from the later one, which is rare and slightly too
                # short.
                self._latest, self._overtakes = self._latest[1::2], self._overtakes[1::2]
        else:
            until = self._overtakes[position]
            if until.at_s < arrival.at_s:  # the sequence was not in the queue at that time
                until = arrival
        waited = {cause.value: total_s - arrival.totals_s.get(cause, 0.0) for cause, total_s in until.totals_s.items()}
        waited[WaitCause.TENANT_SHARE.value] = self._now_s - until.at_s
        return {cause: seconds for cause, seconds in waited.items() if seconds > 0}
