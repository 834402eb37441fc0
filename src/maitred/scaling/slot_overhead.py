"""Slot overhead: the time for which requests have a slot of a replica while no step computes them.

The step times of a replica do not tell all: an answer also waits for the event loops, links and processes that it goes
through, more so on a busy machine. What requests really took, less what their steps explain, is this time. Without it,
a replica that serves short answers would be thought to serve many more than it does, and a queue that does not drain
would be waited for.
"""

from maitred.scaling.capacity import ReplicaCapacity
from maitred.scaling.demand import FinishedWork, RequestMix

_MEMORY_REQUESTS = 100.0
"""The mean is one of about so many requests."""
_LEAST_DECODE_SHARE = 0.05
"""Share of the time that is left to decoding at least, however much prefill there is."""


class SlotOverhead:
    """Mean slot overhead of the requests of one model.

    Attributes:
        mean_s: Mean in seconds; 0 until requests have ended, and where steps explain more than requests took.
    """

    def __init__(self) -> None:
        self.mean_s = 0.0
        self._difference_s = 0.0
        self._requests = 0.0

    def observe(
        self,
        finished: FinishedWork,
        capacity: ReplicaCapacity,
        mix: RequestMix,
        *,
        running: float,
        requests_per_s: float,
    ) -> None:
        """Takes requests that have ended.

        Args:
            finished: The requests.
            capacity: Capacity of a replica, with its step times.
            mix: Sizes of the requests.
            running: Sequences that the steps of a replica compute.
            requests_per_s: Requests per second that a replica gets from all gateways.
        """
        if not finished.requests:
            return
        step_s = capacity.times.fixed_s + max(1.0, running) * capacity.decode_s(mix)
        itl_s = step_s / max(_LEAST_DECODE_SHARE, 1 - requests_per_s * capacity.prefill_s(mix))
        difference_s = (finished.slot_s - finished.output_tokens * itl_s) / finished.requests
        self._requests = min(_MEMORY_REQUESTS, self._requests + finished.requests)
        weight = min(1.0, finished.requests / self._requests)
        self._difference_s += weight * (difference_s - self._difference_s)
        self.mean_s = max(0.0, self._difference_s)
