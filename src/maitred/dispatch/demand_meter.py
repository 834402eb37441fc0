"""Meter of the demand for one model: what has arrived, what waits and what runs."""

from msgspec.structs import replace

from maitred.dispatch.arrivals import ArrivalCounter
from maitred.dispatch.core import DispatchCore
from maitred.scaling.demand import Demand, FinishedWork

_MOST_EXAMINED = 2_000
"""Most waiting requests of a queue that are looked at; beyond it they stand for the others."""


class DemandMeter:
    """Meter of the demand for one model, for the decision on its number of replicas.

    Arrivals are counted as they come. What waits and runs is in the queue and in the load reports, and is read when
    somebody asks. A request that runs in another region because this one was full counts here, so that replicas are
    started here; one that may not run here does not count.

    Args:
        core: State of its dispatch.
        now_s: The present monotonic time.
    """

    def __init__(self, core: DispatchCore, now_s: float) -> None:
        self._core = core
        self._arrivals = core.arrivals = ArrivalCounter(core.weights, now_s)

    def read(self, now_s: float) -> Demand:
        """Returns the demand now, with what has arrived since the last call."""
        return self.add_replicas(self.read_own(now_s))

    def read_own(self, now_s: float) -> Demand:
        """Returns the demand of this gateway alone, with what has arrived since the last call.

        Its requests at replicas count as running: which of them wait there, a replica does not tell by gateway.
        """
        core, uncached_share = self._core, self._core.predictor.expected_uncached_tokens(1)
        waiting, prompt_tokens, output_tokens, oldest_s = 0, 0.0, 0.0, now_s
        for queue in core.queues:
            first = list(queue.first(_MOST_EXAMINED))
            examined = [queued for queued in first if core.is_own_demand(queued.request)]
            if not examined:
                continue
            scale = queue.waiting / len(first)
            waiting += round(scale * len(examined))
            prompt_tokens += scale * sum(queued.request.prompt_tokens for queued in examined)
            output_tokens += scale * sum(map(self._arrivals.expected_output, examined))
            oldest_s = min(oldest_s, min(queued.request.arrived_s for queued in examined))
        loads = {queue.quota: queue.quota.used.slots + queue.waiting for queue in core.queues}
        usable_share, running = core.allocator.quotas.usable_share(loads), self._running()
        return Demand(
            waiting=waiting,
            waiting_prompt_tokens=prompt_tokens * uncached_share,
            waiting_output_tokens=output_tokens,
            running=running,
            confined_requests=(waiting + running) * (1 / usable_share - 1),
            oldest_wait_s=max(0.0, now_s - oldest_s),
            window=self._arrivals.take_window(now_s, uncached_share),
        )

    def add_replicas(self, demand: Demand) -> Demand:
        """Adds what waits at the replicas to the demand of all gateways that use them; it does not run."""
        core = self._core
        ready = [state.load for state in core.endpoint_states if state.ready and state.region == core.region]
        submitted = sum(load.waiting for load in ready)
        return replace(
            demand,
            waiting=demand.waiting + submitted,
            waiting_prompt_tokens=demand.waiting_prompt_tokens + sum(load.waiting_prompt_tokens for load in ready),
            running=max(0, demand.running - submitted),
        )

    def take_finished(self) -> FinishedWork:
        """Returns the requests of this gateway that have ended since the last call."""
        return self._arrivals.take_finished()

    def _running(self) -> int:
        """Returns the running requests that the own region is for, wherever they run."""
        core = self._core
        if core.regions is None:
            return core.running
        return sum(core.is_own_demand(queued.request) for queued in core.running_requests)
