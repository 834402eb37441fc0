"""Load of replicas, estimated from load reports of different age.

The gateway knows its own outstanding requests at a replica. The rest comes from reports: our engines report their
waiting prompt tokens after every step, and external servers may report other clients' load at each poll. A late report
loses weight (`policy.staleness`): the load of such a replica is estimated from the other replicas and from the
gateway's own requests there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from maitred.dispatch.config import ReportsConfig
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.policy.staleness import AgedLoad, estimate_loads, trust


@dataclass(frozen=True, slots=True)
class EstimatedLoad:
    """Load of a replica as estimated from reports, without requests sent since."""

    requests: float
    """Requests of other clients."""
    prompt_tokens: float
    """Prompt tokens that are still to be computed."""


class LoadEstimator:
    """Estimates the load of one model's replicas.

    Args:
        config: The settings.
    """

    def __init__(self, config: ReportsConfig) -> None:
        self._fresh_for_s = config.fresh_s
        self._half_s = config.half_s

    def trust(self, endpoint_state: EndpointState, now_s: float) -> float:
        """Returns the weight of a replica's last report, from 0 to 1."""
        return trust(late_s(endpoint_state, now_s), self._fresh_for_s, self._half_s)

    def estimate_loads(
        self, endpoint_states: Sequence[EndpointState], prompt_tokens: float, now_s: float
    ) -> list[EstimatedLoad]:
        """Returns the estimated load of each endpoint.

        Args:
            endpoint_states: Endpoints that are compared.
            prompt_tokens: Prompt tokens of a typical request, assumed for requests that wait at an external server.
            now_s: Now.
        """
        lateness_s = [late_s(endpoint_state, now_s) for endpoint_state in endpoint_states]
        loads = [_reported_load(endpoint_state, prompt_tokens, now_s) for endpoint_state in endpoint_states]
        if max(lateness_s) <= self._fresh_for_s:
            return loads
        requests = [AgedLoad(load.requests, late) for load, late in zip(loads, lateness_s, strict=True)]
        prompts = [
            AgedLoad(load.prompt_tokens, late, known=min(load.prompt_tokens, _reported_own_tokens(endpoint_state)))
            for load, late, endpoint_state in zip(loads, lateness_s, endpoint_states, strict=True)
        ]
        fresh_s, half_s = self._fresh_for_s, self._half_s
        return list(
            map(EstimatedLoad, estimate_loads(requests, fresh_s, half_s), estimate_loads(prompts, fresh_s, half_s))
        )


def late_s(endpoint_state: EndpointState, now_s: float) -> float:
    """Returns the seconds by which a replica's next report is late.

    Our engines report after every step, so a busy engine's report is due since its step began; an idle engine's report
    is never late.
    """
    endpoint = endpoint_state.endpoint
    if endpoint.reports_capacity:
        return 0.0 if endpoint_state.credits.idle else now_s - endpoint_state.step_began_s
    return inf if endpoint.external_load is None else endpoint.external_load(now_s).late_s


def _reported_load(endpoint_state: EndpointState, prompt_tokens: float, now_s: float) -> EstimatedLoad:
    endpoint = endpoint_state.endpoint
    if endpoint.reports_capacity:
        return EstimatedLoad(0.0, endpoint_state.load.waiting_prompt_tokens)
    if endpoint.external_load is None:
        return EstimatedLoad(0.0, 0.0)
    external = endpoint.external_load(now_s)
    return EstimatedLoad(external.requests, external.waiting * prompt_tokens)


def _reported_own_tokens(endpoint_state: EndpointState) -> int:
    """Returns prompt tokens of our unanswered requests that the report already includes."""
    credits_ = endpoint_state.credits
    return max(0, credits_.unanswered_tokens - credits_.unreported.prompt_tokens)
