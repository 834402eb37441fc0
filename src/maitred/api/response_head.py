"""The heads of answers, as lines.

What an answer tells beside its body is the same for nearly all: where the request stood in the queue, and what its
caller has left of two rates. That is written into a form, which is cut out of what the general way makes of a tally
with marks; so the general way stays the only one that knows the headers. A request of which there is more to tell, or
less, goes the general way.
"""

from collections.abc import Sequence

from maitred.api.dialect import OPENAI, ApiDialect
from maitred.api.errors import Header, clamped_headers, span_of
from maitred.api.timing_headers import milliseconds, timing_headers
from maitred.core.answer import RateLimitStatus, RequestContext
from maitred.core.counters import CounterState
from maitred.core.flow import PriorityClass, QueuePosition
from maitred.wire.event_template import JsonTemplate

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
