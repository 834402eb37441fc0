"""Bounded load: no replica is given much more than its share, whatever reason a policy has.

The idea is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA'18): a replica with more
than `c` times the mean is passed over, wherever a request would go otherwise. Two things differ here.

**What load is.** In the paper, balls stay in their bins. Requests leave, and with the ten or so that a replica has at a
time "at most 1.2 times the mean" would leave hardly more than one choice, so that the bound would undo the purpose of
the policy. So the load of a replica is the service that it was given recently, decaying over some sixty requests per
replica; or its outstanding load, if that is more, so that a replica that has fallen behind is given no more until it
has caught up.

**What full means.** In the paper, a bin takes ``ceil(c * mean)`` balls of one size, so an empty one always takes one.
Requests differ by a factor of a thousand, so a replica may take a request if it is within the bound *with* it, or has
no outstanding load: a user who is alone finds the cache of the last turn, however uneven that is. If no replica is
within the bound, the request goes where the load will be least.
"""

from collections.abc import Sequence

from maitred.core.balance import PlacementRequest, ReplicaCandidate
from maitred.routing.balance.by_load import LoadScorer

_DECAY_REQUESTS = 64.0
"""Requests per replica after which the service that was given before counts for 37 %."""
_MAX_STALE_NAMES = 64
"""Names of removed replicas that may be remembered, beside twice as many as there are candidates."""


class LoadBound:
    """Upper bound on the load of each replica, and the service that each was given.

    The given service decays with every further request, not with time: hours without traffic change nothing. A replica
    that is no candidate for a while keeps its count as it is, and a new replica begins with the mean, so that no
    replica is flooded after an absence.

    Args:
        factor: Multiple of its share by weight that a replica may have; above 1.
        load_scorer: Computes the load of replicas and requests.
    """

    def __init__(self, factor: float, load_scorer: LoadScorer) -> None:
        self._factor = factor
        self._load_scorer = load_scorer
        self._service_given: dict[str, float] = {}

    def load(self, candidate: ReplicaCandidate) -> float:
        """Returns the load of a replica, as the module defines it."""
        return max(self._service_given.get(candidate.name, 0.0), self._load_scorer.load(candidate))

    def filter_candidates(
        self, request: PlacementRequest, candidates: Sequence[ReplicaCandidate]
    ) -> list[ReplicaCandidate]:
        """Returns the candidates that may take the request; at least one."""
        self._add_new_replicas(candidates)
        loads = [self.load(candidate) for candidate in candidates]
        added = [self._load_scorer.added_load(request, candidate) for candidate in candidates]
        total = sum(loads)
        weights = sum(candidate.weight for candidate in candidates)
        after = [
            (load + added_load) / replica.weight
            for load, added_load, replica in zip(loads, added, candidates, strict=True)
        ]
        within = [
            candidate
            for candidate, added_load, relative in zip(candidates, added, after, strict=True)
            if relative <= self._factor * (total + added_load) / weights or self._load_scorer.load(candidate) <= 0
        ]
        least = min(after)
        return within or [replica for replica, relative in zip(candidates, after, strict=True) if relative <= least]

    def record_dispatch(
        self, request: PlacementRequest, chosen: ReplicaCandidate, candidates: Sequence[ReplicaCandidate]
    ) -> None:
        """Records that the request goes to the chosen one of the candidates."""
        self._add_new_replicas(candidates)
        fade = 1.0 - 1.0 / (_DECAY_REQUESTS * len(candidates))
        for candidate in candidates:
            self._service_given[candidate.name] *= fade
        self._service_given[chosen.name] += self._load_scorer.added_load(request, chosen)

    def _add_new_replicas(self, candidates: Sequence[ReplicaCandidate]) -> None:
        """Starts the counts of new replicas at the mean."""
        known = [candidate for candidate in candidates if candidate.name in self._service_given]
        if len(known) == len(candidates):
            return
        known_service = sum(self._service_given[candidate.name] for candidate in known)
        per_weight = known_service / sum(candidate.weight for candidate in known) if known else 0.0
        names = {candidate.name for candidate in candidates}
        if len(self._service_given) > 2 * len(candidates) + _MAX_STALE_NAMES:
            self._service_given = {name: value for name, value in self._service_given.items() if name in names}
        for candidate in candidates:
            self._service_given.setdefault(candidate.name, per_weight * candidate.weight)
