"""Bounded load: every replica gets at most a little more than its share, whatever the policy prefers.

The method is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA'18): a replica with more
than `c` times the mean load is skipped, wherever the policy would send the request. Two definitions differ from the
paper.

In the paper, balls stay in their bins. Requests end, and a replica has only about ten at a time, so "at most 1.2 times
the mean" would leave hardly more than one choice, and the bound would defeat the purpose of the policy. The load of a
replica is therefore the service that it was given recently, which decays over about sixty requests per replica; or its
outstanding load, if that is larger, so that a slow replica gets no more requests until it has caught up.

In the paper, a bin accepts ``ceil(c * mean)`` balls of one size, so an empty bin always accepts one. The sizes of
requests differ by a factor of a thousand, so a replica may take a request if its load *with* the request is within the
bound, or if it has no outstanding load: a single user then gets the cache of the previous turn, even if the load is
uneven. If no replica is within the bound, the request goes to the replica with the smallest resulting load.
"""

from collections.abc import Sequence

from maitred.core.balance import PlacementRequest, ReplicaCandidate
from maitred.routing.balance.by_load import LoadScorer

_DECAY_REQUESTS = 64.0
"""Number of requests per replica after which service that was given before counts for 37 %."""
_MAX_STALE_NAMES = 64
"""Number of removed replicas that may be remembered, besides twice the number of candidates."""


class LoadBound:
    """Upper bound on the load of each replica, with the service that each replica was given.

    The given service decays with each further request and not with time: hours without traffic have no effect. A
    replica that is not a candidate for a while keeps its count, and a new replica begins with the mean, so that no
    replica gets too many requests after an absence.

    Args:
        factor: Largest load of a replica as a multiple of its share by weight; above 1.
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
        """Returns the candidates that may take the request; the list has at least one."""
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
