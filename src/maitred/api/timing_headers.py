"""What the headers of an answer tell about how its request fared: its place in the queue, its priority, its waits.

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


def account_headers(tally: RequestContext, *, explain: bool) -> list[Header]:
    """The headers; none for a request that never came near a queue.

    Args:
        tally: The request's.
        explain: Whether the caller wants to know what it waited for.
    """
    headers = [] if tally.forecast is None else _place_headers(tally.forecast)
    if tally.priority is not None:
        headers.append((b"x-maitred-priority", tally.priority.encode("ascii")))
    if tally.degraded:
        headers += degraded_headers(tally.degraded)
    if tally.fallbacks:
        headers.append(_fallback_header(tally.fallbacks))
    if tally.failed:
        headers.append(_escalated_header(tally.failed))
    if tally.arm is not None:
        headers.append((b"x-maitred-rollout", _UNFIT.sub(b"?", str(tally.arm).encode("utf-8"))))
    if tally.hedged:
        headers.append((b"x-maitred-hedged", tally.hedged.encode("ascii")))
    if tally.chosen is not None and tally.model:
        headers.append((b"x-maitred-model", _UNFIT.sub(b"?", tally.model.encode("utf-8"))))
    if explain:
        headers.append((b"x-maitred-waited", _waits(tally.waited_ms)))
    return headers


def degraded_headers(steps: Sequence[str]) -> list[Header]:
    """What was taken from the request because of the load; nothing if nothing was."""
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


def _place_headers(place: QueuePosition) -> list[Header]:
    return [
        (b"x-maitred-queue-position", b"%d" % place.position),
        (b"x-maitred-predicted-wait-ms", b"%d" % milliseconds(place.wait_s)),
        (b"x-maitred-predicted-ttft-ms", b"%d" % milliseconds(place.ttft_s)),
    ]


def _waits(waited_ms: Mapping[str, float]) -> bytes:
    """The causes, the longest wait first, as a dictionary of structured fields (RFC 8941)."""
    waits = sorted(waited_ms.items(), key=lambda wait: -wait[1])
    return ", ".join(f"{cause}={spent_ms:.1f}" for cause, spent_ms in waits).encode("ascii")


def milliseconds(seconds: float) -> int:
    """Whole milliseconds, rounded up: a prediction that is late is worse than one that is early."""
    return math.ceil(seconds * 1000)
