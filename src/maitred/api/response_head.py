"""The heads of answers, as lines.

What an answer tells beside its body is the same for nearly all: where the request stood in the queue, and what its
caller has left of two rates. That is written into a form, which is cut out of what the general way makes of a tally
with marks; so the general way stays the only one that knows the headers. A request of which there is more to tell, or
less, goes the general way.
"""

from collections.abc import Sequence

from maitred.api.dialect import OPENAI, ApiDialect
from maitred.api.errors import Header, clamped_headers, span_of
from maitred.api.timing_headers import account_headers, milliseconds
from maitred.core.answer import RateLimitStatus, RequestContext
from maitred.core.counters import CounterState
from maitred.core.flow import PriorityClass, QueuePosition
from maitred.wire.event_template import JsonForm

_PAIR = b": ".join
_CLOSE = b"connection", b"close"


def told_headers(tally: RequestContext, dialect: ApiDialect, *, explain: bool) -> list[Header]:
    """What every answer tells of its request.

    Args:
        tally: The request's.
        dialect: Of the API that was called.
        explain: Whether the caller wants to know what it waited for.
    """
    headers = [(b"x-request-id", tally.request_id.encode("ascii")), *dialect.head(tally)]
    if tally.clamped_max_tokens is not None:
        headers += clamped_headers(tally.clamped_max_tokens)
    return headers + account_headers(tally, explain=explain)


def told_lines(tally: RequestContext, dialect: ApiDialect, *, explain: bool) -> bytes | None:
    """The same as `lines_of` makes of them."""
    if explain or dialect is not OPENAI or (lines := _usual_lines(tally)) is None:
        return lines_of(told_headers(tally, dialect, explain=explain))
    return lines


def lines_of(headers: Sequence[Header]) -> bytes | None:
    """Headers as lines, each with its end; None where ASGI's `send` has to see to it.

    That is where one holds more than a line, or says that the connection is closed.
    """
    lines = b"\r\n".join([*map(_PAIR, headers), b""])
    sound = lines.count(b"\n") == len(headers) == lines.count(b"\r")
    return lines if sound and _CLOSE not in headers else None


def _usual_lines(tally: RequestContext) -> bytes | None:
    """The lines by the form; None: it has not what there is to tell."""
    standing, place, priority = tally.standing, tally.forecast, tally.priority
    if standing is None or place is None or priority is None:
        return None
    requests, tokens = standing.requests, standing.tokens
    if requests is None or tokens is None or tally.clamped_max_tokens is not None or tally.chosen is not None:
        return None
    if tally.degraded or tally.fallbacks or tally.failed or tally.hedged or tally.arm is not None:
        return None
    return _USUAL.fill(
        (
            tally.request_id.encode("ascii"),
            *(requests.capacity, max(0, requests.remaining), span_of(requests.reset_s)),
            *(tokens.capacity, max(0, tokens.remaining), span_of(tokens.reset_s)),
            *(place.position, milliseconds(place.wait_s), milliseconds(place.ttft_s)),
            priority.encode("ascii"),
        )
    )


def _usual_form() -> JsonForm:
    tally = RequestContext("an-id", 0.0, priority=PriorityClass.STANDARD)
    tally.standing = RateLimitStatus(CounterState(1001, 1002, 0.301), CounterState(1003, 1004, 0.302))
    tally.forecast = QueuePosition(1005, 2.0055, 2.0065)
    lines = lines_of(told_headers(tally, OPENAI, explain=False))
    assert lines is not None, "these are"
    standing = (b"1001", b"1002", b"301ms", b"1003", b"1004", b"302ms")
    return JsonForm(lines, (b"an-id", *standing, b"1005", b"2006", b"2007", b"standard"))


_USUAL = _usual_form()
