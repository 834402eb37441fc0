"""Capacity of a replica: the load that it serves within the objectives, from its measured step times."""

import msgspec

from maitred.core.replica import StepTimes
from maitred.scaling.demand import RequestMix


class ReplicaCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica can serve, by the linear model of its step times.

    It does not depend on the mix of the requests: the mix is an argument of each question.
    """

    times: StepTimes
    max_sequences: int
    kv_tokens: int
    step_tokens: int = 2_048
    """Most tokens of a step."""

    def knee(self, mix: RequestMix, *, ttft_s: float, itl_s: float) -> "ReplicaLoad":
        """Returns the highest load at which both objectives are met, with what binds there."""
        raise NotImplementedError

    def load(self, mix: RequestMix, requests_per_s: float) -> "ReplicaLoad":
        """Returns batch, step time and TTFT of a replica in steady state at this rate."""
        raise NotImplementedError


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A replica in steady state at some rate of requests of a mix."""

    requests_per_s: float
    utilisation: float
    """Share of the time that the work of these requests takes; the fixed time of steps fills the rest."""
    batch: float
    """Mean number of running sequences."""
    itl_s: float
    """Mean step time: the time between two tokens of an answer."""
    ttft_s: float
    """Time to first token of the slow requests of the mix; infinite where the queue grows."""
    bound: str = ""
    """What keeps the load from being higher: itl, ttft, slots or kv; empty: the rate was given."""


class CapacityEstimator:
    """Capacity of a model's replicas as learned from their reports.

    Only reports of replicas that are warm count: those of a replica that has just begun to serve, drains, or whose
    report is stale say nothing of what a replica can do.

    Args:
        warm_up_s: For how long the reports of a new replica do not count.
    """

    def __init__(self, *, warm_up_s: float = 30.0) -> None:
        raise NotImplementedError

    def observe(
        self, name: str, times: StepTimes, *, serving_for_s: float, is_draining: bool = False, is_stale: bool = False
    ) -> None:
        """Takes the step times that a replica reports, if they count."""
        raise NotImplementedError

    def forget(self, name: str) -> None:
        """Forgets a replica that has left. What was learned stays until there is a report of another one."""
        raise NotImplementedError

    def capacity(self, *, max_sequences: int, kv_tokens: int, step_tokens: int = 2_048) -> ReplicaCapacity | None:
        """Returns the capacity of a typical replica; None: it is not known yet."""
        raise NotImplementedError
