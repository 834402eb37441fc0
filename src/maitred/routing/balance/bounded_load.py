"""Nobody is given much more than its share, however good a reason a policy has.

The idea is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA'18): whoever has more than
`c` times the mean is passed over, wherever a request would go otherwise. Two things differ here.

**What load is.** There, balls stay in their bins. Requests leave, and with the ten or so that a replica has at a time
"at most 1.2 times the mean" would leave hardly more than one choice, so that the bound would undo what the policy is
for. So the load of a replica is the service that it was given lately, fading over some sixty requests per replica; or
what is outstanding there, if that is more, so that one that has fallen behind is given no more until it has caught up.

**What full means.** There, a bin takes ``ceil(c * mean)`` balls of one size, so an empty one always takes one. Requests
differ by a factor of a thousand, so a replica may take a request if it is within the bound *with* it, or has nothing to
do: a user who is alone finds the cache of the last turn, however uneven that is. If nobody may, the request goes where
the load will be least.
"""

from collections.abc import Sequence

from maitred.core.balance import PlacementRequest, ReplicaCandidate
from maitred.routing.balance.loads import ReplicaLoads

_MEMORY = 64.0
"""Requests per replica after which what was given counts for 37 %."""
_LITTER = 64
"""Names of replicas that are gone may be remembered, beside twice as many as there are."""


class LoadBound:
    """The bound, and what was given to whom.

    What is given fades with every further request, not with time: a quiet night changes nothing. Whoever is no
    candidate for a while keeps its account as it is, and a replica that is new begins with the mean, so nobody is
    flooded for having been away.

    Args:
        factor: Times its share by weight that a replica may have; above 1.
        loads: Counts service.
    """

    def __init__(self, factor: float, loads: ReplicaLoads) -> None:
        self._factor = factor
        self._loads = loads
        self._given: dict[str, float] = {}

    def load(self, candidate: ReplicaCandidate) -> float:
        """Its load; see the module."""
        return max(self._given.get(candidate.name, 0.0), self._loads.load(candidate))

    def within(self, inquiry: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> list[ReplicaCandidate]:
        """Those that may take the request; at least one."""
        self._add_new(candidates)
        loads = [self.load(candidate) for candidate in candidates]
        added = [self._loads.added(inquiry, candidate) for candidate in candidates]
        total = sum(loads)
        weights = sum(candidate.weight for candidate in candidates)
        after = [(load + own) / each.weight for load, own, each in zip(loads, added, candidates, strict=True)]
        within = [
            candidate
            for candidate, own, relative in zip(candidates, added, after, strict=True)
            if relative <= self._factor * (total + own) / weights or self._loads.load(candidate) <= 0
        ]
        least = min(after)
        return within or [each for each, relative in zip(candidates, after, strict=True) if relative <= least]

    def on_dispatch(
        self, inquiry: PlacementRequest, chosen: ReplicaCandidate, candidates: Sequence[ReplicaCandidate]
    ) -> None:
        """The request goes to one of them."""
        self._add_new(candidates)
        fade = 1.0 - 1.0 / (_MEMORY * len(candidates))
        for candidate in candidates:
            self._given[candidate.name] *= fade
        self._given[chosen.name] += self._loads.added(inquiry, chosen)

    def _add_new(self, candidates: Sequence[ReplicaCandidate]) -> None:
        """Those who are new get an account."""
        known = [candidate for candidate in candidates if candidate.name in self._given]
        if len(known) == len(candidates):
            return
        given = sum(self._given[candidate.name] for candidate in known)
        per_weight = given / sum(candidate.weight for candidate in known) if known else 0.0
        names = {candidate.name for candidate in candidates}
        if len(self._given) > 2 * len(candidates) + _LITTER:
            self._given = {name: value for name, value in self._given.items() if name in names}
        for candidate in candidates:
            self._given.setdefault(candidate.name, per_weight * candidate.weight)
