"""Round-robin policies, and the order that resolves ties in the other policies."""

from collections.abc import Callable, Sequence

from maitred.core.balance import PlacementRequest, ReplicaCandidate

_MAX_STALE_NAMES = 64
"""Number of removed replicas that may be remembered, besides twice the number of candidates."""


class RoundRobinOrder:
    """Order in which replicas were last chosen."""

    def __init__(self) -> None:
        self._last_chosen: dict[str, int] = {}
        self._next_number = 0

    def record_choice(self, candidate: ReplicaCandidate, candidate_count: int) -> ReplicaCandidate:
        """Records that a candidate was chosen from `candidate_count` candidates, and returns it."""
        self._next_number += 1
        self._last_chosen.pop(candidate.name, None)
        self._last_chosen[candidate.name] = self._next_number
        while len(self._last_chosen) > 2 * candidate_count + _MAX_STALE_NAMES:
            del self._last_chosen[next(iter(self._last_chosen))]
        return candidate

    def pick_least(
        self, candidates: Sequence[ReplicaCandidate], key: Callable[[ReplicaCandidate], float]
    ) -> ReplicaCandidate:
        """Returns the candidate with the smallest key; if keys are equal, the one chosen longest ago."""
        return min(candidates, key=lambda candidate: (key(candidate), self._last_chosen.get(candidate.name, 0)))


class RoundRobin:
    """Policy that chooses the replica that was chosen longest ago.

    The policy needs no fixed list, so replicas may be added and removed.
    """

    def __init__(self) -> None:
        self._order = RoundRobinOrder()

    def choose(self, request: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """Chooses the replica that was chosen longest ago. Implements `core.balance.LoadBalancer`."""
        return self._order.record_choice(self._order.pick_least(candidates, lambda _: 0.0), len(candidates))


class WeightedRoundRobin:
    """Policy that chooses each replica as often as its weight says, spread evenly.

    It is nginx's smooth weighted round robin. In every turn each candidate gets credit equal to its weight; the
    candidate with the most credit is chosen and loses the sum of all weights. Weights 3, 1 and 1 give the order a b a c
    a, and not a a a b c.
    """

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def choose(self, request: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """Chooses the replica with the most credit. Implements `core.balance.LoadBalancer`."""
        credit = self._credit
        if len(credit) > 2 * len(candidates) + _MAX_STALE_NAMES:
            credit.clear()
        for candidate in candidates:
            credit[candidate.name] = credit.get(candidate.name, 0.0) + candidate.weight
        chosen = max(candidates, key=lambda candidate: credit[candidate.name])
        credit[chosen.name] -= sum(candidate.weight for candidate in candidates)
        return chosen
