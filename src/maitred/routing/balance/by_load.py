"""Policies that go by what is outstanding at each replica."""

from collections.abc import Callable, Sequence

from maitred.core.balance import PlacementRequest, ReplicaCandidate
from maitred.routing.balance.loads import ReplicaLoads
from maitred.routing.balance.round_robin import RoundRobinOrder


class LeastRequests:
    """Where the fewest requests are, by weight."""

    def __init__(self) -> None:
        self._order = RoundRobinOrder()

    def choose(self, inquiry: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """See `core.balance.Balance`."""
        # The request itself is counted, so that of idle replicas the one with the greater weight comes first.
        least = self._order.least(candidates, lambda candidate: (candidate.requests + 1) / candidate.weight)
        return self._order.on_chosen(least, len(candidates))


class LeastTokens:
    """Where the least service is outstanding, by weight.

    Args:
        loads: Counts it.
    """

    def __init__(self, loads: ReplicaLoads) -> None:
        self._loads = loads
        self._order = RoundRobinOrder()

    def choose(self, inquiry: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """See `core.balance.Balance`."""
        least = self._order.least(candidates, self._loads.relative)
        return self._order.on_chosen(least, len(candidates))


class PowerOfTwo:
    """Of two that are drawn, the one with less outstanding.

    Looking at two is nearly as good as looking at all (Mitzenmacher, 2001), and several gateways that look at the same
    reports do not all run to the one that was least loaded when these were written.

    Args:
        loads: Counts what is outstanding.
        draw: Evenly from [0, 1).
    """

    def __init__(self, loads: ReplicaLoads, draw: Callable[[], float]) -> None:
        self._loads = loads
        self._draw = draw

    def choose(self, inquiry: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """See `core.balance.Balance`."""
        if len(candidates) == 1:
            return candidates[0]
        first = int(self._draw() * len(candidates))
        second = (first + 1 + int(self._draw() * (len(candidates) - 1))) % len(candidates)
        return min(candidates[first], candidates[second], key=self._loads.relative)
