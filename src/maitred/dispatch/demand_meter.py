"""Meter of the demand for one model: what has arrived, what waits and what runs."""

from maitred.dispatch.arrivals import ArrivalCounter
from maitred.dispatch.core import DispatchCore
from maitred.scaling.demand import Demand

_MOST_EXAMINED = 2_000
"""Most waiting requests of a queue that are looked at; beyond it they stand for the others."""


class DemandMeter:
    """Meter of the demand for one model, for the decision on its number of replicas.

    Arrivals are counted as they come. What waits and runs is in the queue and in the load reports, and is read when
    somebody asks.

    Args:
        core: State of its dispatch.
        now_s: The present monotonic time.
    """

    def __init__(self, core: DispatchCore, now_s: float) -> None:
        self._core = core
        self._arrivals = core.arrivals = ArrivalCounter(core.weights, now_s)

    def read(self, now_s: float) -> Demand:
        """Returns the demand now, with what has arrived since the last call."""
        core, uncached_share = self._core, self._core.predictor.expected_uncached_tokens(1)
        waiting, prompt_tokens, output_tokens, oldest_s = 0, 0.0, 0.0, now_s
        for queue in core.queues:
            examined = list(queue.first(_MOST_EXAMINED))
            if not examined:
                continue
            scale = queue.waiting / len(examined)
            waiting += queue.waiting
            prompt_tokens += scale * sum(queued.request.prompt_tokens for queued in examined)
            output_tokens += scale * sum(map(self._arrivals.expected_output, examined))
            oldest_s = min(oldest_s, min(queued.request.arrived_s for queued in examined))
        submitted = sum(state.load.waiting for state in core.endpoint_states if state.ready)
        return Demand(
            waiting=waiting + submitted,
            waiting_prompt_tokens=prompt_tokens * uncached_share
            + sum(state.load.waiting_prompt_tokens for state in core.endpoint_states if state.ready),
            waiting_output_tokens=output_tokens,
            running=max(0, core.running - submitted),
            oldest_wait_s=max(0.0, now_s - oldest_s),
            window=self._arrivals.take_window(now_s, uncached_share),
        )
