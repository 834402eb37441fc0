"""Load balancer of one model's replicas: load bound, then session affinity, then policy.

::

    candidates --weight 0--> out --over the bound--> out --session--> its replica
                                                        `---none----> the policy's choice
"""

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b

from maitred.core.balance import LoadBalancer, PlacementRequest, ReplicaCandidate
from maitred.core.flow import ServiceWeights
from maitred.routing.balance.bounded_load import LoadBound
from maitred.routing.balance.by_load import LeastRequests, LeastTokens, LoadScorer, PowerOfTwo
from maitred.routing.balance.config import BalanceConfig, PolicyName
from maitred.routing.balance.round_robin import RoundRobin, WeightedRoundRobin
from maitred.routing.balance.ttft import PredictedTtft


class Balancer:
    """Load balancer of the replicas of one model. Implements `core.balance.LoadBalancer`.

    Args:
        config: The settings.
        weights: Weights of service per token.
        draw: Draws a uniform random number from [0, 1), for policies that use randomness.
    """

    def __init__(self, config: BalanceConfig, weights: ServiceWeights, draw: Callable[[], float]) -> None:
        load_scorer = LoadScorer(weights)
        self._affinity = config.affinity
        self._bound = None if config.bound is None else LoadBound(config.bound, load_scorer)
        self._policy = _make_policy(config, load_scorer, draw)

    def choose(self, request: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """Chooses a replica for the request and counts the choice; implements `core.balance.LoadBalancer`.

        Raises:
            ValueError: Every candidate has a weight of 0.
        """
        eligible = [candidate for candidate in candidates if candidate.weight > 0]
        if not eligible:
            raise ValueError("there is no replica to choose")
        within = self._bound.filter_candidates(request, eligible) if self._bound is not None else eligible
        if self._affinity and request.session is not None:
            chosen = session_replica(request.session, within)
        else:
            chosen = self._policy.choose(request, within)
        if self._bound is not None:
            self._bound.record_dispatch(request, chosen, eligible)
        return chosen


def _make_policy(config: BalanceConfig, load_scorer: LoadScorer, draw: Callable[[], float]) -> LoadBalancer:
    policies: dict[PolicyName, Callable[[], LoadBalancer]] = {
        "predicted_ttft": lambda: PredictedTtft(load_scorer, config.recompute_price),
        "round_robin": RoundRobin,
        "least_requests": LeastRequests,
        "least_tokens": lambda: LeastTokens(load_scorer),
        "power_of_two": lambda: PowerOfTwo(load_scorer, draw),
        "weighted": WeightedRoundRobin,
    }
    return policies[config.policy]()


_HASH_RANGE = 2.0**64


def session_replica(session: str, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
    """Returns the candidate that serves a session.

    The method is rendezvous hashing (Thaler and Ravishankar, 1998): each pair of session and replica has a number that
    looks random, and the session goes to the replica with the smallest number. If a replica is added or removed, only
    the sessions that it gets or had move; there is no table, and all gateways compute the same result. The numbers
    follow an exponential distribution with the weight as its rate, so each replica gets a share of the sessions equal
    to its share of the weight.
    """

    def number(candidate: ReplicaCandidate) -> float:
        digest = blake2b(f"{session}\0{candidate.name}".encode(), digest_size=8).digest()
        return -math.log((int.from_bytes(digest) + 1) / (_HASH_RANGE + 1)) / candidate.weight

    return min(candidates, key=number)
