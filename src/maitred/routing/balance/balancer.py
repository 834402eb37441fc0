"""Where a request goes: bound, then session, then policy.

::

    candidates --weight 0--> out --over the bound--> out --session--> its home
                                                        `---none----> the policy's choice
"""

from collections.abc import Callable, Sequence

from maitred.core.balance import LoadBalancer, PlacementRequest, ReplicaCandidate
from maitred.core.flow import ServiceWeights
from maitred.routing.balance.affinity import session_replica
from maitred.routing.balance.bounded_load import LoadBound
from maitred.routing.balance.by_load import LeastRequests, LeastTokens, PowerOfTwo
from maitred.routing.balance.config import BalanceConfig, PolicyName
from maitred.routing.balance.loads import ReplicaLoads
from maitred.routing.balance.round_robin import RoundRobin, WeightedRoundRobin
from maitred.routing.balance.ttft import PredictedTtft


class Balancer:
    """Implements `core.balance.Balance` for the replicas of one model.

    Args:
        config: The settings.
        weights: What tokens count.
        draw: Evenly from [0, 1); for policies that leave something to chance.
    """

    def __init__(self, config: BalanceConfig, weights: ServiceWeights, draw: Callable[[], float]) -> None:
        loads = ReplicaLoads(weights)
        self._affinity = config.affinity
        self._bound = None if config.bound is None else LoadBound(config.bound, loads)
        self._policy = _policy(config, loads, draw)

    def choose(self, inquiry: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """See `core.balance.Balance`.

        Raises:
            ValueError: There is no candidate with a weight above 0.
        """
        open_ones = [candidate for candidate in candidates if candidate.weight > 0]
        if not open_ones:
            raise ValueError("there is no replica to choose")
        within = self._bound.within(inquiry, open_ones) if self._bound is not None else open_ones
        if self._affinity and inquiry.session is not None:
            chosen = session_replica(inquiry.session, within)
        else:
            chosen = self._policy.choose(inquiry, within)
        if self._bound is not None:
            self._bound.on_dispatch(inquiry, chosen, open_ones)
        return chosen


def _policy(config: BalanceConfig, loads: ReplicaLoads, draw: Callable[[], float]) -> LoadBalancer:
    policies: dict[PolicyName, Callable[[], LoadBalancer]] = {
        "predicted_ttft": lambda: PredictedTtft(loads, config.recompute_price),
        "round_robin": RoundRobin,
        "least_requests": LeastRequests,
        "least_tokens": lambda: LeastTokens(loads),
        "power_of_two": lambda: PowerOfTwo(loads, draw),
        "weighted": WeightedRoundRobin,
    }
    return policies[config.policy]()
