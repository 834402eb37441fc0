"""Which of the replicas that have room for a request takes it."""

from collections.abc import Mapping, Sequence

from maitred.core.balance import CacheAwareBalancer, PlacementRequest, ReplicaCandidate
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.load_reports import LoadReports, ReportedLoad
from maitred.dispatch.pool_queue import QueuedRequest, QueueState
from maitred.dispatch.predictor import UNMEASURED, LatencyPredictor
from maitred.dispatch.request import DispatchRequest

_DEFAULT_CAPACITY_TOKENS = 131_072
"""Of a cache that nothing is said of."""
_UNKNOWN_OUTPUT_TOKENS = 64.0
_NOTHING: Mapping[str, int] = {}
_SAME_S = 0.005
"""What caches hold of a prompt is looked up once for a request that is foreseen, placed and released so fast..."""
_WAITS_S = 1.0
"""...and so often for one that waits, to tell how long it still will."""


class ReplicaSelector:
    """Tells a placement what it goes by, and what has come of it.

    Args:
        balancer: Decides. None: the replica with the most room takes it.
        predictor: What is predicted.
        reports: What is believed of the replicas' own words.

    Attributes:
        balancer: See above.
    """

    def __init__(self, placement: CacheAwareBalancer | None, predictor: LatencyPredictor, reports: LoadReports) -> None:
        self.balancer = placement
        self._predictor = predictor
        self._reports = reports
        self._steps: dict[str, int] = {}

    def reconfigure(self, placement: CacheAwareBalancer | None, reports: LoadReports) -> None:
        """Goes by these from now on."""
        self.balancer = placement
        self._reports = reports

    def select(self, queued: QueuedRequest, endpoint_states: Sequence[EndpointState], now_s: float) -> EndpointState:
        """Selects one of these endpoints, of which there is at least one."""
        queued.candidates = ()
        if len(endpoint_states) == 1:
            return endpoint_states[0]
        if self.balancer is None:
            return max(endpoint_states, key=prefill_ease)
        dispatch_request = queued.request
        held = self._cached_by(queued, endpoint_states, now_s)
        named = {endpoint_state.endpoint.name: endpoint_state for endpoint_state in endpoint_states}
        inquiry = PlacementRequest(
            dispatch_request.prompt_tokens, queued.expected_tokens * dispatch_request.choices, dispatch_request.session
        )
        words = self._reports.estimate_loads(endpoint_states, self._predictor.typical_prompt_tokens, now_s)
        candidates = [
            self._candidate(
                endpoint_state, word, dispatch_request.prompt_tokens, held.get(endpoint_state.endpoint.name, 0), now_s
            )
            for endpoint_state, word in zip(endpoint_states, words, strict=True)
        ]
        queued.candidates = candidates
        return named[self.balancer.choose(inquiry, candidates).name]

    def cached_tokens(self, dispatch_request: DispatchRequest) -> int:
        """Leading tokens of its prompts that one of the replicas holds, as far as that is followed."""
        if self.balancer is None:
            return 0
        return max(
            self.balancer.cached_tokens(dispatch_request.principal_org, dispatch_request.prompts).values(), default=0
        )

    def prefill_s(
        self,
        queued: QueuedRequest,
        endpoint_state: EndpointState,
        ahead: int,
        now_s: float,
        *,
        released_s: float | None = None,
    ) -> float:
        """From its release to its first token there, before any correction.

        Of its prompt has to be computed what the replica does not hold, as far as that is told; else as much as usual.

        Args:
            queued: The request.
            endpoint_state: Where it will run.
            ahead: Requests that are released to it in the same moment.
            now_s: Now.
            released_s: When it is released; None: now.
        """
        if endpoint_state.load.times == UNMEASURED:
            return 0.0
        within_s = _WAITS_S if queued.state is QueueState.WAITING else _SAME_S
        held_tokens = self._cached_by(queued, (endpoint_state,), now_s, within_s).get(endpoint_state.endpoint.name)
        from_s = now_s if released_s is None else released_s
        if held_tokens is None:
            return self.usual_prefill_s(queued, endpoint_state, ahead, from_s)
        fresh_tokens = queued.request.prompt_tokens - held_tokens
        return self._predictor.prefill_s(fresh_tokens, held_tokens, endpoint_state, ahead, from_s)

    def usual_prefill_s(self, queued: QueuedRequest, endpoint_state: EndpointState, ahead: int, now_s: float) -> float:
        """Returns the prefill time where nothing is known of the endpoint's cache."""
        prompt_tokens = queued.request.prompt_tokens
        fresh_tokens = self._predictor.to_compute(prompt_tokens)
        return self._predictor.prefill_s(fresh_tokens, prompt_tokens - fresh_tokens, endpoint_state, ahead, now_s)

    def _cached_by(
        self, queued: QueuedRequest, endpoint_states: Sequence[EndpointState], now_s: float, within_s: float = _SAME_S
    ) -> Mapping[str, int]:
        """For each replica that is followed, how much of its prompts it holds; none where nobody knows their tokens.

        Args:
            queued: The request.
            endpoint_states: Those in question.
            now_s: Now.
            within_s: What was looked up so long ago is as good.
        """
        placement = self.balancer
        if placement is None:
            return _NOTHING
        for endpoint_state in endpoint_states:
            if self._on_restart(endpoint_state):
                placement.on_restart(endpoint_state.endpoint.name)
                queued.cached_tokens = None
        if queued.cached_tokens is None or now_s - queued.cached_tokens_at_s > within_s:
            dispatch_request = queued.request
            known = all(prompt[:1] for prompt in dispatch_request.prompts)
            queued.cached_tokens = (
                placement.cached_tokens(dispatch_request.principal_org, dispatch_request.prompts) if known else _NOTHING
            )
            queued.cached_tokens_at_s = now_s
        return queued.cached_tokens

    def on_dispatch(self, queued: QueuedRequest, endpoint_state: EndpointState) -> None:
        """A request was released to that replica."""
        if self.balancer is not None:
            capacity_tokens = endpoint_state.load.total_blocks * endpoint_state.block_tokens or _DEFAULT_CAPACITY_TOKENS
            self.balancer.on_dispatch(
                endpoint_state.endpoint.name, capacity_tokens, queued.request.principal_org, queued.request.prompts
            )

    def _candidate(
        self, endpoint_state: EndpointState, word: ReportedLoad, prompt_tokens: int, held_tokens: int, now_s: float
    ) -> ReplicaCandidate:
        account = endpoint_state.credits
        load = endpoint_state.load
        wait_s = prefill_s = None
        if load.times != UNMEASURED:
            wait_s = self._predictor.prefill_s(0, 0, endpoint_state, 0, now_s)
            whole_s = self._predictor.prefill_s(prompt_tokens - held_tokens, held_tokens, endpoint_state, 0, now_s)
            prefill_s = max(0.0, whole_s - wait_s)
            wait_s = max(0.0, wait_s + load.times.token_s * (word.prompt_tokens - load.waiting_prompt_tokens))
        half_answer = (self._predictor.outputs.mean or _UNKNOWN_OUTPUT_TOKENS) / 2
        return ReplicaCandidate(
            endpoint_state.endpoint.name,
            weight=endpoint_state.weight,
            requests=account.held + round(word.requests),
            prompt_tokens=word.prompt_tokens + account.uncounted.prompt_tokens,
            # Answers that run are over by half, on average.
            output_tokens=(account.outstanding.slots + word.requests) * half_answer,
            cached_tokens=held_tokens,
            wait_s=wait_s,
            prefill_s=prefill_s,
        )

    def _on_restart(self, endpoint_state: EndpointState) -> bool:
        """Whether an engine has started anew since somebody asked: it counts its steps from 0 again."""
        name, steps = endpoint_state.endpoint.name, endpoint_state.load.steps
        before, self._steps[name] = self._steps.get(name, 0), steps
        return steps < before


def prefill_ease(endpoint_state: EndpointState) -> float:
    """How much of a replica is free."""
    return endpoint_state.free.slots / max(1, endpoint_state.total.slots)
