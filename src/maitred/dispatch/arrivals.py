"""Counter of the requests that arrive at one model, and of their tokens, for the decision on its number of replicas."""

from maitred.core.flow import ServiceWeights
from maitred.dispatch.queue import QueuedRequest
from maitred.scaling.demand import ArrivalWindow, FinishedWork

_MIN_WINDOW_S = 0.05
"""Shortest window: rates of shorter ones would be those of single requests."""
_REFUSED_FOR_S = 5.0
"""For so long after its arrival, a refused request may be tried again: with less to do, or after others have moved."""


class ArrivalCounter:
    """Counter of arrivals, refused requests included: those are demand too, and the queue never sees them.

    Args:
        weights: Service of each kind of token.
        now_s: The present monotonic time.
    """

    def __init__(self, weights: ServiceWeights, now_s: float) -> None:
        self._weights = weights
        self._since_s = now_s
        self._requests = 0
        self._prompt_tokens = 0
        self._expected_tokens = 0.0
        self._finished = 0.0
        self._finished_tokens = 0.0
        self._ended = FinishedWork()
        """Requests that have ended where they began."""
        self._refused: dict[tuple[str, str, float], None] = {}
        """Organisation, id and time of arrival of requests that were refused lately, in the order of their refusal."""

    def on_refused(self, queued: QueuedRequest) -> None:
        """Counts a request that was refused; the same one counts once, even if it is admitted after all."""
        key = _key(queued)
        if key not in self._refused:
            self._refused[key] = None
            self._count(queued)

    def on_arrival(self, queued: QueuedRequest) -> None:
        """Counts a request that has joined or was dispatched at once."""
        if not self._refused or _key(queued) not in self._refused:
            self._count(queued)

    def _count(self, queued: QueuedRequest) -> None:
        self._requests += 1
        self._prompt_tokens += queued.request.prompt_tokens
        self._expected_tokens += self.expected_output(queued)

    def on_finished(self, queued: QueuedRequest, now_s: float) -> None:
        """Counts the output of a request that has ended normally, and the time that it took."""
        self._finished += 1
        self._finished_tokens += queued.output_tokens
        if not queued.requeues:
            ended = self._ended
            self._ended = FinishedWork(
                requests=ended.requests + 1,
                output_tokens=ended.output_tokens + queued.output_tokens,
                slot_s=ended.slot_s + queued.cost.slots * (now_s - queued.dispatched_s),
            )

    def take_finished(self) -> FinishedWork:
        """Returns what has ended since the last call."""
        ended, self._ended = self._ended, FinishedWork()
        return ended

    def expected_output(self, queued: QueuedRequest) -> float:
        """Returns the output tokens that were expected of a request when it arrived."""
        weights = self._weights
        return (queued.service - weights.prompt * queued.request.prompt_tokens) / weights.output

    def take_window(self, now_s: float, uncached_share: float) -> ArrivalWindow:
        """Returns what has arrived since the last call.

        Outputs are known when they end. Those that have ended stand for as many that have arrived, so that their sizes
        vary as real ones do; the others count with what is expected of them.

        Args:
            now_s: The present monotonic time.
            uncached_share: Share of prompt tokens that no prefix cache has.
        """
        known = min(float(self._requests), self._finished)
        known_tokens = self._finished_tokens * known / self._finished if known else 0.0
        expected = self._expected_tokens / self._requests if self._requests else 0.0
        window = ArrivalWindow(
            start_s=self._since_s,
            length_s=max(_MIN_WINDOW_S, now_s - self._since_s),
            requests=self._requests,
            prompt_tokens=self._prompt_tokens * uncached_share,
            output_tokens=known_tokens + (self._requests - known) * expected,
            cached_tokens=self._prompt_tokens * (1 - uncached_share),
        )
        self._finished -= known
        self._finished_tokens -= known_tokens
        self._since_s = now_s
        self._requests, self._prompt_tokens, self._expected_tokens = 0, 0, 0.0
        self._refused = {key: None for key in self._refused if key[2] > now_s - _REFUSED_FOR_S}
        return window


def _key(queued: QueuedRequest) -> tuple[str, str, float]:
    """Returns what tells a request from others: clients may repeat ids."""
    request = queued.request
    return request.organisation, request.id, request.arrived_s
