"""Headers that tell how a request fared: queue position, priority, waits.

Good answers and refusals have them alike. Numbers are predictions of the moment at which the request joined the queue,
or would have joined it.
"""

import math
import re
from collections.abc import Mapping, Sequence

from maitred.api.errors import Header
from maitred.core.answer import RejectedAnswer, RequestContext
from maitred.core.flow import QueuePosition

_UNFIT = re.compile(rb"[^ -~]")
"""What a header's value cannot hold. A model's name can."""


def timing_headers(context: RequestContext, *, explain: bool) -> list[Header]:
    """The headers; none for a request that never came near a queue.

    Args:
        context: The request's.
        explain: Whether the caller wants to know what it waited for.
    """
    headers = [] if context.predicted_position is None else _position_headers(context.predicted_position)
    if context.priority is not None:
        headers.append((b"x-maitred-priority", context.priority.encode("ascii")))
    if context.degraded:
        headers += degraded_headers(context.degraded)
    if context.fallbacks:
        headers.append(_fallback_header(context.fallbacks))
    if context.rejected_answers:
        headers.append(_escalated_header(context.rejected_answers))
    if context.arm is not None:
        headers.append((b"x-maitred-rollout", _UNFIT.sub(b"?", str(context.arm).encode("utf-8"))))
    if context.hedged:
        headers.append((b"x-maitred-hedged", context.hedged.encode("ascii")))
    if context.selection is not None and context.model:
        headers.append((b"x-maitred-model", _UNFIT.sub(b"?", context.model.encode("utf-8"))))
    if explain:
        headers.append((b"x-maitred-waited", _waits(context.waited_ms)))
    return headers


def degraded_headers(steps: Sequence[str]) -> list[Header]:
    """Returns headers that say what was taken from the request because of the load; none if nothing was."""
    if not steps:
        return []
    return [(b"x-maitred-degraded", _UNFIT.sub(b"?", ", ".join(steps).encode("utf-8")))]


def _fallback_header(fallbacks: Sequence[str]) -> Header:
    """Which models were tried after the one that was asked for, the one that answers last."""
    return b"x-maitred-fallback", _UNFIT.sub(b"?", ", ".join(fallbacks).encode("utf-8"))


def _escalated_header(failed: Sequence[RejectedAnswer]) -> Header:
    """The models whose answers failed a check, and which."""
    told = ", ".join(f"{each.model}={each.reason}" for each in failed)
    return b"x-maitred-escalated", _UNFIT.sub(b"?", told.encode("utf-8"))


def _position_headers(position: QueuePosition) -> list[Header]:
    return [
        (b"x-maitred-queue-position", b"%d" % position.position),
        (b"x-maitred-predicted-wait-ms", b"%d" % milliseconds(position.wait_s)),
        (b"x-maitred-predicted-ttft-ms", b"%d" % milliseconds(position.ttft_s)),
    ]


def _waits(waited_ms: Mapping[str, float]) -> bytes:
    """The causes, the longest wait first, as a dictionary of structured fields (RFC 8941)."""
    waits = sorted(waited_ms.items(), key=lambda wait: -wait[1])
    return ", ".join(f"{cause}={spent_ms:.1f}" for cause, spent_ms in waits).encode("ascii")


def milliseconds(seconds: float) -> int:
    """Whole milliseconds, rounded up: a prediction that is late is worse than one that is early."""
    return math.ceil(seconds * 1000)
