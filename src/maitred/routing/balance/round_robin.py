"""Policies that take turns, and the turns by which all others break ties."""

from collections.abc import Callable, Sequence

from maitred.core.balance import PlacementRequest, ReplicaCandidate

_LITTER = 64
"""Names of replicas that are gone may be remembered, beside twice as many as there are."""


class RoundRobinOrder:
    """Who was chosen when."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._next_number = 0

    def on_chosen(self, candidate: ReplicaCandidate, among: int) -> ReplicaCandidate:
        """It was chosen, of so many."""
        self._next_number += 1
        self._last.pop(candidate.name, None)
        self._last[candidate.name] = self._next_number
        while len(self._last) > 2 * among + _LITTER:
            del self._last[next(iter(self._last))]
        return candidate

    def least(
        self, candidates: Sequence[ReplicaCandidate], key: Callable[[ReplicaCandidate], float]
    ) -> ReplicaCandidate:
        """The candidate with the least key; of equal ones, the one that was chosen longest ago."""
        return min(candidates, key=lambda candidate: (key(candidate), self._last.get(candidate.name, 0)))


class RoundRobin:
    """Each in its turn: whoever was chosen longest ago. It needs no fixed list, so replicas may come and go."""

    def __init__(self) -> None:
        self._order = RoundRobinOrder()

    def choose(self, inquiry: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """See `core.balance.Balance`."""
        return self._order.on_chosen(self._order.least(candidates, lambda _: 0.0), len(candidates))


class WeightedRoundRobin:
    """Each as often as its weight says, and spread evenly (nginx's smooth weighted round robin).

    Every turn each candidate earns its weight; whoever has most is chosen and pays what all have earned. A weight of 3
    beside two of 1 gives a b a c a, not a a a b c.
    """

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def choose(self, inquiry: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """See `core.balance.Balance`."""
        credit = self._credit
        if len(credit) > 2 * len(candidates) + _LITTER:
            credit.clear()
        for candidate in candidates:
            credit[candidate.name] = credit.get(candidate.name, 0.0) + candidate.weight
        chosen = max(candidates, key=lambda candidate: credit[candidate.name])
        credit[chosen.name] -= sum(candidate.weight for candidate in candidates)
        return chosen
