"""Selects the replica for a request among those that have capacity."""

from collections.abc import Mapping, Sequence

from maitred.core.balance import CacheAwareBalancer, PlacementRequest, ReplicaCandidate
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.load_estimator import EstimatedLoad, LoadEstimator
from maitred.dispatch.predictor import UNMEASURED, LatencyPredictor
from maitred.dispatch.queue import QueuedRequest, QueueState
from maitred.dispatch.request import DispatchRequest

_DEFAULT_CAPACITY_TOKENS = 131_072
"""Assumed cache size of a replica that does not report one."""
_UNKNOWN_OUTPUT_TOKENS = 64.0
_NO_CACHED_TOKENS: Mapping[str, int] = {}
_LOOKUP_TTL_S = 0.005
"""Time for which the cached prompt tokens of a request are not looked up again. It covers a forecast, the selection and
the dispatch of a request that does not wait."""
_WAITING_LOOKUP_TTL_S = 1.0
"""The same time for a request that waits; its forecasts need no exact lookup."""


class ReplicaSelector:
    """Selects the replica of a request with a cache-aware balancer.

    Args:
        balancer: Balancer that chooses the replica; None: the replica with the most free slots is chosen.
        predictor: Predictor of prefill times.
        load_estimator: Estimates the load of the replicas from their reports.

    Attributes:
        balancer: The balancer, or None.
    """

    def __init__(
        self, balancer: CacheAwareBalancer | None, predictor: LatencyPredictor, load_estimator: LoadEstimator
    ) -> None:
        self.balancer = balancer
        self._predictor = predictor
        self._load_estimator = load_estimator
        self._last_step_counts: dict[str, int] = {}

    def reconfigure(self, balancer: CacheAwareBalancer | None, load_estimator: LoadEstimator) -> None:
        """Replaces the balancer and the load estimator."""
        self.balancer = balancer
        self._load_estimator = load_estimator

    def select(self, queued: QueuedRequest, endpoint_states: Sequence[EndpointState], now_s: float) -> EndpointState:
        """Selects one of these endpoints, of which there is at least one."""
        queued.candidates = ()
        if len(endpoint_states) == 1:
            return endpoint_states[0]
        if self.balancer is None:
            return max(endpoint_states, key=free_slot_share)
        dispatch_request = queued.request
        cached_tokens = self._cached_tokens_by_replica(queued, endpoint_states, now_s)
        endpoint_by_name = {endpoint_state.endpoint.name: endpoint_state for endpoint_state in endpoint_states}
        placement_request = PlacementRequest(
            dispatch_request.prompt_tokens, queued.expected_tokens * dispatch_request.choices, dispatch_request.session
        )
        estimated_loads = self._load_estimator.estimate_loads(
            endpoint_states, self._predictor.typical_prompt_tokens, now_s
        )
        candidates = [
            self._candidate(
                endpoint_state,
                estimated_load,
                dispatch_request.prompt_tokens,
                cached_tokens.get(endpoint_state.endpoint.name, 0),
                now_s,
            )
            for endpoint_state, estimated_load in zip(endpoint_states, estimated_loads, strict=True)
        ]
        queued.candidates = candidates
        return endpoint_by_name[self.balancer.choose(placement_request, candidates).name]

    def cached_tokens(self, dispatch_request: DispatchRequest) -> int:
        """Returns the most leading prompt tokens that any replica is known to have cached."""
        if self.balancer is None:
            return 0
        return max(
            self.balancer.cached_tokens(dispatch_request.organisation, dispatch_request.prompts).values(), default=0
        )

    def prefill_s(
        self,
        queued: QueuedRequest,
        endpoint_state: EndpointState,
        ahead: int,
        now_s: float,
        *,
        dispatched_s: float | None = None,
    ) -> float:
        """Returns the seconds from dispatch to the first token, without correction.

        The engine computes the tokens that are not cached; if the cache content is unknown, the usual share is assumed.

        Args:
            queued: The request.
            endpoint_state: Endpoint where the request will run.
            ahead: Number of requests that are dispatched to that endpoint just before it.
            now_s: Now.
            dispatched_s: Time of dispatch, in monotonic seconds; None: now.
        """
        if endpoint_state.load.times == UNMEASURED:
            return 0.0
        within_s = _WAITING_LOOKUP_TTL_S if queued.state is QueueState.WAITING else _LOOKUP_TTL_S
        held_tokens = self._cached_tokens_by_replica(queued, (endpoint_state,), now_s, within_s).get(
            endpoint_state.endpoint.name
        )
        from_s = now_s if dispatched_s is None else dispatched_s
        if held_tokens is None:
            return self.usual_prefill_s(queued, endpoint_state, ahead, from_s)
        uncached_tokens = queued.request.prompt_tokens - held_tokens
        return self._predictor.prefill_s(uncached_tokens, held_tokens, endpoint_state, ahead, from_s)

    def usual_prefill_s(self, queued: QueuedRequest, endpoint_state: EndpointState, ahead: int, now_s: float) -> float:
        """Returns the prefill time if the content of the endpoint's cache is unknown."""
        prompt_tokens = queued.request.prompt_tokens
        fresh_tokens = self._predictor.expected_uncached_tokens(prompt_tokens)
        return self._predictor.prefill_s(fresh_tokens, prompt_tokens - fresh_tokens, endpoint_state, ahead, now_s)

    def _cached_tokens_by_replica(
        self,
        queued: QueuedRequest,
        endpoint_states: Sequence[EndpointState],
        now_s: float,
        within_s: float = _LOOKUP_TTL_S,
    ) -> Mapping[str, int]:
        """Returns the cached prompt tokens by replica; empty if the prompt's tokens are unknown.

        Args:
            queued: The request.
            endpoint_states: Endpoints that are compared.
            now_s: Now.
            within_s: Maximum age of an earlier lookup that may be reused.
        """
        balancer = self.balancer
        if balancer is None:
            return _NO_CACHED_TOKENS
        for endpoint_state in endpoint_states:
            if self._has_restarted(endpoint_state):
                balancer.on_restart(endpoint_state.endpoint.name)
                queued.cached_tokens = None
        if queued.cached_tokens is None or now_s - queued.cached_tokens_at_s > within_s:
            dispatch_request = queued.request
            known = all(prompt[:1] for prompt in dispatch_request.prompts)  # unknown tokens have a length and no values
            queued.cached_tokens = (
                balancer.cached_tokens(dispatch_request.organisation, dispatch_request.prompts)
                if known
                else _NO_CACHED_TOKENS
            )
            queued.cached_tokens_at_s = now_s
        return queued.cached_tokens

    def on_dispatch(self, queued: QueuedRequest, endpoint_state: EndpointState) -> None:
        """Tells the balancer that a request was dispatched to an endpoint."""
        if self.balancer is not None:
            capacity_tokens = endpoint_state.load.total_blocks * endpoint_state.block_tokens or _DEFAULT_CAPACITY_TOKENS
            self.balancer.on_dispatch(
                endpoint_state.endpoint.name, capacity_tokens, queued.request.organisation, queued.request.prompts
            )

    def _candidate(
        self,
        endpoint_state: EndpointState,
        estimated_load: EstimatedLoad,
        prompt_tokens: int,
        held_tokens: int,
        now_s: float,
    ) -> ReplicaCandidate:
        account = endpoint_state.credits
        load = endpoint_state.load
        wait_s = prefill_s = None
        if load.times != UNMEASURED:
            wait_s = self._predictor.prefill_s(0, 0, endpoint_state, 0, now_s)
            wait_and_prefill_s = self._predictor.prefill_s(
                prompt_tokens - held_tokens, held_tokens, endpoint_state, 0, now_s
            )
            prefill_s = max(0.0, wait_and_prefill_s - wait_s)
            wait_s = max(0.0, wait_s + load.times.token_s * (estimated_load.prompt_tokens - load.waiting_prompt_tokens))
            wait_s += endpoint_state.round_trip_s
        half_answer = (self._predictor.outputs.mean or _UNKNOWN_OUTPUT_TOKENS) / 2
        return ReplicaCandidate(
            endpoint_state.endpoint.name,
            weight=endpoint_state.weight,
            requests=account.request_count + round(estimated_load.requests),
            prompt_tokens=estimated_load.prompt_tokens + account.unreported.prompt_tokens,
            # On average, half of each running output is already produced.
            output_tokens=(account.outstanding.slots + estimated_load.requests) * half_answer,
            cached_tokens=held_tokens,
            wait_s=wait_s,
            prefill_s=prefill_s,
        )

    def _has_restarted(self, endpoint_state: EndpointState) -> bool:
        """Whether the engine restarted since the last call; its step count then starts at 0 again."""
        name, steps = endpoint_state.endpoint.name, endpoint_state.load.steps
        before, self._last_step_counts[name] = self._last_step_counts.get(name, 0), steps
        return steps < before


def free_slot_share(endpoint_state: EndpointState) -> float:
    """Returns the free share of a replica's slots."""
    return endpoint_state.free.slots / max(1, endpoint_state.total.slots)
