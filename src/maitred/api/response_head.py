"""Heads of answers, as lines: queue position, priority, waits, rates.

What an answer tells beside its body is the same for nearly all: where the request stood in the queue, and what its
caller has left of two rates. That is written into a form, which is cut out of what the general way makes of a context
with marks; so the general way stays the only one that knows the headers. A request of which there is more to tell, or
less, goes the general way.

Good answers and refusals have them alike. Numbers are predictions of the moment at which the request joined the queue,
or would have joined it.
"""

import math
import re
from collections.abc import Mapping, Sequence

from maitred.api.dialect import OPENAI, ApiDialect, Header, clamped_headers, span_of
from maitred.core.context import RateLimitStatus, RejectedAnswer, RequestContext
from maitred.core.counters import CounterState
from maitred.core.flow import PriorityClass, QueuePosition
from maitred.wire.sse import JsonTemplate

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
    models = ", ".join(f"{answer.model}={answer.reason}" for answer in failed)
    return b"x-maitred-escalated", _UNFIT.sub(b"?", models.encode("utf-8"))


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


_PAIR = b": ".join
_CLOSE = b"connection", b"close"


def response_headers(context: RequestContext, dialect: ApiDialect, *, explain: bool) -> list[Header]:
    """Returns the headers that every response has.

    Args:
        context: The request's.
        dialect: Of the API that was called.
        explain: Whether the caller wants to know what it waited for.
    """
    headers = [(b"x-request-id", context.request_id.encode("ascii")), *dialect.head(context)]
    if context.clamped_max_tokens is not None:
        headers += clamped_headers(context.clamped_max_tokens)
    return headers + timing_headers(context, explain=explain)


def response_head_lines(context: RequestContext, dialect: ApiDialect, *, explain: bool) -> bytes | None:
    """Returns the same headers as encoded lines."""
    if explain or dialect is not OPENAI or (lines := _usual_lines(context)) is None:
        return encode_lines(response_headers(context, dialect, explain=explain))
    return lines


def encode_lines(headers: Sequence[Header]) -> bytes | None:
    """Headers as lines, each with its end; None where ASGI's `send` has to see to it.

    That is where one holds more than a line, or says that the connection is closed.
    """
    lines = b"\r\n".join([*map(_PAIR, headers), b""])
    sound = lines.count(b"\n") == len(headers) == lines.count(b"\r")
    return lines if sound and _CLOSE not in headers else None


def _usual_lines(context: RequestContext) -> bytes | None:
    """The lines by the form; None: it has not what there is to tell."""
    rate_limits, position, priority = context.rate_limits, context.predicted_position, context.priority
    if rate_limits is None or position is None or priority is None:
        return None
    requests, tokens = rate_limits.requests, rate_limits.tokens
    if requests is None or tokens is None or context.clamped_max_tokens is not None or context.selection is not None:
        return None
    if context.degraded or context.fallbacks or context.rejected_answers or context.hedged or context.arm is not None:
        return None
    return _USUAL.fill(
        (
            context.request_id.encode("ascii"),
            *(requests.capacity, max(0, requests.remaining), span_of(requests.reset_s)),
            *(tokens.capacity, max(0, tokens.remaining), span_of(tokens.reset_s)),
            *(position.position, milliseconds(position.wait_s), milliseconds(position.ttft_s)),
            priority.encode("ascii"),
        )
    )


def _usual_form() -> JsonTemplate:
    context = RequestContext("an-id", 0.0, priority=PriorityClass.STANDARD)
    context.rate_limits = RateLimitStatus(CounterState(1001, 1002, 0.301), CounterState(1003, 1004, 0.302))
    context.predicted_position = QueuePosition(1005, 2.0055, 2.0065)
    lines = encode_lines(response_headers(context, OPENAI, explain=False))
    assert lines is not None, "these are"
    standing = (b"1001", b"1002", b"301ms", b"1003", b"1004", b"302ms")
    return JsonTemplate(lines, (b"an-id", *standing, b"1005", b"2006", b"2007", b"standard"))


_USUAL = _usual_form()
