"""Overflow rules: which requests move to another model, and when overflow ends.

Another model must compute the whole prompt of a request that moves. The cached part of its prompt is lost, so requests
with the smallest cached share move first, and conversations with cached prompts stay. Of requests with a similar cached
share, the newest moves first, because the others have waited longer.

Only as many requests move as needed for the rest to meet their objective. A group is the requests of one tenant and
class; the wait of its last request is taken as proportional to the group's service, so a tenth less service is a tenth
less wait.

Once overflow starts, requests move until the prediction is below a share of the objective, and overflow ends when it
has stayed below for some time (`OverflowState`). Without this hysteresis, overflow would start and stop with every
request.

Pure: requests and times are arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_REUSE_LEVELS = 10
"""Number of cached-share levels; few, because all prompts share the chat template's start."""


@dataclass(frozen=True, slots=True)
class OverflowCandidate:
    """A request that may move to another model."""

    prompt_tokens: int
    held_tokens: int
    """Leading prompt tokens that are cached at this model's replicas."""
    service: float
    """Predicted service of the request."""
    arrived_s: float

    @property
    def reuse(self) -> int:
        """Cached share of the prompt in tenths, rounded down."""
        return _REUSE_LEVELS * self.held_tokens // max(1, self.prompt_tokens)


def select_overflow(candidates: Sequence[OverflowCandidate], service: float) -> list[int]:
    """Returns the indexes of the fewest candidates, at least one, whose service reaches `service`.

    Args:
        candidates: Requests that may move.
        service: Service that must be removed from the queue.

    Returns:
        An empty list if all candidates together are not enough.
    """
    order = sorted(range(len(candidates)), key=lambda number: _keep_priority(candidates[number]))
    moved_service = 0.0
    for count, number in enumerate(order, 1):
        moved_service += candidates[number].service
        if moved_service >= service:
            return order[:count]
    return []


def surplus(service: float, wait_s: float, late_s: float) -> float:
    """Returns the service to remove from a group so that its last request meets its objective.

    Args:
        service: Service of the whole group.
        wait_s: Predicted wait of its last request.
        late_s: Seconds by which that request misses its objective.
    """
    return service * min(1.0, max(0.0, late_s) / wait_s) if wait_s > 0 else 0.0


def _keep_priority(candidate: OverflowCandidate) -> tuple[int, float]:
    """Returns a sort key: lower values move first."""
    return candidate.reuse, -candidate.arrived_s


class OverflowState:
    """Hysteresis state: whether the requests of one group move to another model.

    Args:
        back_below: Share of the objective that predictions must stay below before overflow ends.
        back_after_s: Seconds for which they must stay below it.
    """

    __slots__ = ("_back_after_s", "_back_below", "_below_since_s", "is_on")

    def __init__(self, back_below: float, back_after_s: float) -> None:
        self.is_on = False
        self._back_below = back_below
        self._back_after_s = back_after_s
        self._below_since_s: float | None = None

    @property
    def allowed(self) -> float:
        """Largest share of the objective that a prediction may take without overflow."""
        return self._back_below if self.is_on else 1.0

    def observe(self, share: float, now_s: float) -> None:
        """Takes one prediction into account.

        Args:
            share: Predicted TTFT of the group's last request over its objective; 0: no request waits.
            now_s: Now.
        """
        if share > 1.0:
            self.is_on = True
        if share > self._back_below:
            self._below_since_s = None
        elif self._below_since_s is None:
            self._below_since_s = now_s
        if self._below_since_s is not None and now_s - self._below_since_s >= self._back_after_s:
            self.is_on = False
