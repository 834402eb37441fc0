"""Timeline of dispatch: how long a request waited and why, and which replica it was given."""

from typing import Any

from maitred.core.balance import ReplicaCandidate
from maitred.core.timeline import SpanName
from maitred.dispatch.pool_queue import QueuedRequest


class WaitSpan:
    """One wait of a request, from joining the line, or being put back into it, to its end.

    Args:
        queued: The request's.
        now_s: Since when it waits.
    """

    __slots__ = ("_before_ms", "_queued", "_span")

    def __init__(self, queued: QueuedRequest, now_s: float) -> None:
        self._queued = queued
        self._before_ms = {**queued.waited_ms}
        self._span = queued.request.timeline.begin(
            SpanName.QUEUE, now_s, **{"class": queued.flow.priority, "tenant": queued.tenant.id}
        )

    def close(self, now_s: float) -> None:
        """Closes the span: the request was dispatched, or has failed."""
        queued, before_ms = self._queued, self._before_ms
        waited_ms = {
            str(cause): round(spent_ms - before_ms.get(cause, 0.0), 3) for cause, spent_ms in queued.waited_ms.items()
        }
        self._span.end(now_s, "" if queued.failure is None else queued.failure.code, waited_ms=waited_ms)
        _note_choice(queued, now_s)

    def on_leave(self, now_s: float, why: str) -> None:
        """Closes the span of a request that leaves without having been dispatched."""
        self._span.end(now_s, why)


def record_immediate_dispatch(queued: QueuedRequest, now_s: float) -> None:
    """Tells of one that was released in the moment in which it came."""
    facts = {"class": queued.flow.priority, "tenant": queued.tenant.id, "waited_ms": {}}
    queued.request.timeline.record(SpanName.QUEUE, now_s, now_s, facts)
    _note_choice(queued, now_s)


def _note_choice(queued: QueuedRequest, now_s: float) -> None:
    if queued.allocation is None:
        return
    candidates = [_facts_of(candidate) for candidate in queued.candidates] if queued.candidates else []
    facts = {"replica": queued.allocation.endpoint_state.endpoint.name, "candidates": candidates}
    queued.request.timeline.record(SpanName.ROUTING, now_s, now_s, facts)
    queued.candidates = ()


def _facts_of(candidate: ReplicaCandidate) -> dict[str, Any]:
    """Returns the facts that spoke for a replica and against it."""
    wait_s, prefill_s = candidate.wait_s, candidate.prefill_s
    return {
        "replica": candidate.name,
        "predicted_ttft_s": None if wait_s is None or prefill_s is None else round(wait_s + prefill_s, 6),
        "wait_s": None if wait_s is None else round(wait_s, 6),
        "prefill_s": None if prefill_s is None else round(prefill_s, 6),
        "held_tokens": candidate.cached_tokens,
        "requests": candidate.requests,
        "prompt_tokens": round(candidate.prompt_tokens),
        "output_tokens": round(candidate.output_tokens),
        "weight": round(candidate.weight, 4),
    }
