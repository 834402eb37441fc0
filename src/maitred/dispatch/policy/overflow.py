"""Overflow decisions: which requests leave the queue under pressure, and when the pressure is over.

A request that is sent elsewhere has to be computed there from its first token on. What is lost by it is what the caches
here hold of its prompt; so those go of whose prompts least is held here, and the conversations stay that are cheap to
go on with. Among those of whom about as much is held, the newest goes: the others have waited for longer.

So many go that what remains is expected to meet its objective, and no more. Within one group, the requests of one
tenant and class, the wait of the last is shared out over all before it by their service: who takes a tenth of it away
shortens the wait by a tenth.

Where pressure begins, requests go until what remains takes less than a part of the objective, and they do so until that
has been so for a while (`OverflowState`). Without this hysteresis, each request that ends would call back one that the
next arrival sends away.

Pure: what is known of the requests, and the time, are arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_ALIKE = 10
"""Parts of a prompt into which reuse is sorted: every prompt has the head of the chat template in common."""


@dataclass(frozen=True, slots=True)
class OverflowCandidate:
    """A request that may leave."""

    prompt_tokens: int
    held_tokens: int
    """Leading tokens of its prompt that a cache here holds."""
    service: float
    """That it takes here."""
    arrived_s: float

    @property
    def reuse(self) -> int:
        """How much of its prompt is held, in tenths, rounded down."""
        return _ALIKE * self.held_tokens // max(1, self.prompt_tokens)


def select_overflow(candidates: Sequence[OverflowCandidate], service: float) -> list[int]:
    """Chooses the candidates that leave, by number: as few as take so much service away, and at least one.

    Args:
        candidates: Who may leave.
        service: That has to go.

    Returns:
        Nobody, where all of them together would not be enough.
    """
    order = sorted(range(len(candidates)), key=lambda number: _keeping(candidates[number]))
    gone = 0.0
    for count, number in enumerate(order, 1):
        gone += candidates[number].service
        if gone >= service:
            return order[:count]
    return []


def surplus(service: float, wait_s: float, late_s: float) -> float:
    """The part of the service before the end of a group that is too much, if its last request is to come in time.

    Args:
        service: Of the whole group.
        wait_s: Of its last request, as predicted.
        late_s: By how much that is too long.
    """
    return service * min(1.0, max(0.0, late_s) / wait_s) if wait_s > 0 else 0.0


def _keeping(candidate: OverflowCandidate) -> tuple[int, float]:
    """The less, the sooner it leaves."""
    return candidate.reuse, -candidate.arrived_s


class OverflowState:
    """Whether the requests of one group are being sent elsewhere.

    Args:
        back_below: Part of the objective that a prediction must be below...
        back_after_s: ...for so long, until requests stay again.
    """

    __slots__ = ("_back_after_s", "_back_below", "_calm_since_s", "is_on")

    def __init__(self, back_below: float, back_after_s: float) -> None:
        self.is_on = False
        self._back_below = back_below
        self._back_after_s = back_after_s
        self._calm_since_s: float | None = None

    @property
    def allowed(self) -> float:
        """The part of the objective that a request may be predicted to take if it is to stay."""
        return self._back_below if self.is_on else 1.0

    def observe(self, share: float, now_s: float) -> None:
        """Takes one prediction into account.

        Args:
            share: Of the last of the group, over its objective; 0 when nobody waits.
            now_s: Now.
        """
        if share > 1.0:
            self.is_on = True
        if share > self._back_below:
            self._calm_since_s = None
        elif self._calm_since_s is None:
            self._calm_since_s = now_s
        if self._calm_since_s is not None and now_s - self._calm_since_s >= self._back_after_s:
            self.is_on = False
