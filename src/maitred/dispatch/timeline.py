"""What dispatch tells of a request: how long it waited and why, and which replica it was given."""

from typing import Any

from maitred.core.balance import ReplicaCandidate
from maitred.core.timeline import SpanName
from maitred.dispatch.pool_queue import QueuedRequest


class WaitSpan:
    """One wait of a request, from joining the line, or being put back into it, to its end.

    Args:
        ticket: The request's.
        now_s: Since when it waits.
    """

    __slots__ = ("_before_ms", "_chapter", "_ticket")

    def __init__(self, ticket: QueuedRequest, now_s: float) -> None:
        self._ticket = ticket
        self._before_ms = {**ticket.waited_ms}
        self._chapter = ticket.errand.story.begin(
            SpanName.QUEUE, now_s, **{"class": ticket.flow.priority, "tenant": ticket.tenant.id}
        )

    def over(self, now_s: float) -> None:
        """It was released to a replica, or has failed."""
        ticket, before_ms = self._ticket, self._before_ms
        waited_ms = {
            str(cause): round(spent_ms - before_ms.get(cause, 0.0), 3) for cause, spent_ms in ticket.waited_ms.items()
        }
        self._chapter.end(now_s, "" if ticket.failure is None else ticket.failure.code, waited_ms=waited_ms)
        _note_choice(ticket, now_s)

    def left(self, now_s: float, why: str) -> None:
        """It does not wait any more, and was not released."""
        self._chapter.end(now_s, why)


def walked_in(ticket: QueuedRequest, now_s: float) -> None:
    """Tells of one that was released in the moment in which it came."""
    facts = {"class": ticket.flow.priority, "tenant": ticket.tenant.id, "waited_ms": {}}
    ticket.errand.story.tell(SpanName.QUEUE, now_s, now_s, facts)
    _note_choice(ticket, now_s)


def _note_choice(ticket: QueuedRequest, now_s: float) -> None:
    if ticket.grip is None:
        return
    candidates = [_facts_of(candidate) for candidate in ticket.candidates] if ticket.candidates else []
    facts = {"replica": ticket.grip.station.post.name, "candidates": candidates}
    ticket.errand.story.tell(SpanName.ROUTING, now_s, now_s, facts)
    ticket.candidates = ()


def _facts_of(candidate: ReplicaCandidate) -> dict[str, Any]:
    """What spoke for a replica and against it."""
    wait_s, prefill_s = candidate.wait_s, candidate.prefill_s
    return {
        "replica": candidate.name,
        "predicted_ttft_s": None if wait_s is None or prefill_s is None else round(wait_s + prefill_s, 6),
        "wait_s": None if wait_s is None else round(wait_s, 6),
        "prefill_s": None if prefill_s is None else round(prefill_s, 6),
        "held_tokens": candidate.held_tokens,
        "requests": candidate.requests,
        "prompt_tokens": round(candidate.prompt_tokens),
        "output_tokens": round(candidate.output_tokens),
        "weight": round(candidate.weight, 4),
    }
