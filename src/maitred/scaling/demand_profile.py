"""Profile of the demand over a day or a week: the usual rate at each time of it."""

from maitred.scaling.forecast_snapshot import ProfileSnapshot


class DemandProfile:
    """Usual rate in each slot of a period that repeats.

    Args:
        period_s: Length of the period.
        slots: Number of equal slots in it.
        newest_weight: Weight of the newest period.
    """

    def __init__(self, period_s: float, slots: int, *, newest_weight: float = 0.4) -> None:
        self._period_s = period_s
        self._slot_s = period_s / slots
        self._newest_weight = newest_weight
        self._rates: list[float | None] = [None] * slots
        self._slot = -1
        self._sum = 0.0
        self._seconds = 0.0

    def observe(self, at_s: float, requests_per_s: float, seconds: float) -> None:
        """Takes the rate of a short time that begins at `at_s`."""
        slot = int(at_s % self._period_s / self._slot_s)
        if slot != self._slot:
            self._close()
            self._slot = slot
        self._sum += requests_per_s * seconds
        self._seconds += seconds

    def _close(self) -> None:
        # A slot that was observed only in part would count as a whole one.
        if self._seconds > 0.5 * self._slot_s:
            rate, known = self._sum / self._seconds, self._rates[self._slot]
            self._rates[self._slot] = rate if known is None else known + self._newest_weight * (rate - known)
        self._sum = self._seconds = 0.0

    def at(self, at_s: float) -> float | None:
        """Returns the usual rate at a time, between the middles of the slots around it; None: it is not known."""
        place = at_s % self._period_s / self._slot_s - 0.5
        before = int(place // 1) % len(self._rates)
        first, second = self._rates[before], self._rates[(before + 1) % len(self._rates)]
        if first is None or second is None:
            return None
        return first + (place % 1) * (second - first)

    def snapshot(self) -> ProfileSnapshot:
        """Returns what was learnt."""
        return ProfileSnapshot([*self._rates], self._slot, self._sum, self._seconds)

    def restore(self, snapshot: ProfileSnapshot) -> None:
        """Goes on from a snapshot.

        Raises:
            ValueError: It is that of another profile.
        """
        if len(snapshot.rates) != len(self._rates):
            raise ValueError(f"the profile has {len(snapshot.rates)} slots")
        self._rates = [*snapshot.rates]
        self._slot, self._sum, self._seconds = snapshot.slot, snapshot.sum, snapshot.seconds
