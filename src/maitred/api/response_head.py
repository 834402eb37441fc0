"""Header lines of responses: queue position, priority, waits, caches and rate limits.

Most responses have the same headers beside the body:
the queue position of the request, and the remaining amount of two rates of the caller; where there is a cache of
answers, also that it had no answer, or was not asked. These headers are written with a template, which is cut from the
output of the general function for a context with marker values; so only the general function knows the headers. A
response with more or fewer headers is written by the general function.

Successful responses and refusals have the same headers. The numbers are predictions from the moment at which the
request joined the queue, or would have joined it.
"""

import math
import re
from collections.abc import Mapping, Sequence

from maitred.api.dialect import OPENAI, ApiDialect, Header, clamped_headers, span_of
from maitred.core.context import CacheResult, CacheStatus, RateLimitStatus, RejectedAnswer, RequestContext
from maitred.core.counters import CounterState
from maitred.core.flow import PriorityClass, QueuePosition
from maitred.core.inference import InferenceRequest
from maitred.core.request import SamplingParams
from maitred.wire.sse import JsonTemplate

_UNFIT = re.compile(rb"[^ -~]")
"""Characters that a header value cannot hold. The name of a model can contain them."""


_LONGEST_MODEL_NAME = 256
_MOST_FIELDS = 16
_LONGEST_FIELD_NAME = 64
"""Most fields that a header names, and most characters of each: a client chooses them."""
_MAX_RELAXED_BYTES = 1024


def timing_headers(context: RequestContext, *, explain: bool) -> list[Header]:
    """Returns the timing headers; empty for a request that did not reach a queue.

    Args:
        context: The request context.
        explain: Whether the caller wants to know what it waited for.
    """
    headers: list[Header] = []
    position = context.predicted_position
    if position is not None:
        headers += [
            (b"x-maitred-queue-position", b"%d" % position.position),
            (b"x-maitred-predicted-wait-ms", b"%d" % milliseconds(position.wait_s)),
            (b"x-maitred-predicted-ttft-ms", b"%d" % milliseconds(position.ttft_s)),
        ]
    if context.model and context.request is not None:
        name = context.request.model[:_LONGEST_MODEL_NAME]
        headers.append((b"x-maitred-requested-model", _UNFIT.sub(b"?", name.encode("utf-8", "replace"))))
    if context.priority is not None:
        headers.append((b"x-maitred-priority", context.priority.encode("ascii")))
    if context.degraded:
        headers += degraded_headers(context.degraded)
    if context.ignored_fields:
        headers.append(_ignored_header(context.ignored_fields))
    if context.relaxed:
        relaxed = ", ".join(context.relaxed).encode("utf-8")
        headers.append((b"x-maitred-relaxed", _UNFIT.sub(b"?", relaxed[:_MAX_RELAXED_BYTES])))
    if context.fallbacks:
        headers.append(_fallback_header(context.fallbacks))
    if context.rejected_answers:
        headers.append(_escalated_header(context.rejected_answers))
    if context.arm is not None:
        headers.append((b"x-maitred-rollout", _UNFIT.sub(b"?", str(context.arm).encode("utf-8"))))
    if context.served_region is not None:
        headers.append((b"x-maitred-served-region", _UNFIT.sub(b"?", context.served_region.encode("utf-8"))))
    if context.hedged:
        headers.append((b"x-maitred-hedged", context.hedged.encode("ascii")))
    if context.selection is not None and context.model:
        headers.append((b"x-maitred-model", _UNFIT.sub(b"?", context.model.encode("utf-8"))))
    if context.cache is not None:
        headers += _cache_headers(context.cache)
    if explain:
        headers.append((b"x-maitred-waited", _waits(context.waited_ms)))
    return headers


def degraded_headers(steps: Sequence[str]) -> list[Header]:
    """Returns headers that list what was removed from the request because of load; empty for nothing."""
    if not steps:
        return []
    return [(b"x-maitred-degraded", _UNFIT.sub(b"?", ", ".join(steps).encode("utf-8")))]


def _cache_headers(cache: CacheResult) -> list[Header]:
    """Returns headers that say what the cache of answers did, with the age and the name of the answer.

    Where similar questions were looked up, there is also how similar the nearest one is, and how rarely such hits are
    wrong. The name and the similarity also stand under the names that clients know from LiteLLM.
    """
    headers = [(b"x-maitred-cache", cache.status.encode("ascii"))]
    if cache.age_s is not None:
        headers.append((b"age", b"%d" % max(0.0, cache.age_s)))
    if cache.key:
        key = cache.key.encode("ascii")
        headers += [(b"x-maitred-cache-key", key), (b"x-litellm-cache-key", key)]
    if not cache.semantic_state:
        return headers
    headers.append((b"x-maitred-cache-state", cache.semantic_state.encode("ascii")))
    if cache.similarity is not None:
        similarity = b"%.3f" % cache.similarity
        headers += [(b"x-maitred-cache-similarity", similarity), (b"x-litellm-semantic-similarity", similarity)]
    if cache.false_hit_bound is not None:
        headers.append((b"x-maitred-cache-false-hit-bound", b"%.5f" % cache.false_hit_bound))
    return headers


def _ignored_header(fields: Sequence[str]) -> Header:
    """Returns the header that lists the fields of the request which were left out, the first of them."""
    named = [field[:_LONGEST_FIELD_NAME] for field in fields[:_MOST_FIELDS]]
    named += ["..."] if len(fields) > _MOST_FIELDS else []
    return b"x-maitred-ignored", _UNFIT.sub(b"?", ", ".join(named).encode("utf-8", "replace"))


def _fallback_header(fallbacks: Sequence[str]) -> Header:
    """Returns the header that lists the models tried after the requested one; the last one has answered."""
    return b"x-maitred-fallback", _UNFIT.sub(b"?", ", ".join(fallbacks).encode("utf-8"))


def _escalated_header(failed: Sequence[RejectedAnswer]) -> Header:
    """Returns the header that lists the models whose answers failed a check, with the checks."""
    models = ", ".join(f"{answer.model}={answer.reason}" for answer in failed)
    return b"x-maitred-escalated", _UNFIT.sub(b"?", models.encode("utf-8"))


def _waits(waited_ms: Mapping[str, float]) -> bytes:
    """Returns the causes of waiting, longest first, as a dictionary of structured fields (RFC 8941)."""
    waits = sorted(waited_ms.items(), key=lambda wait: -wait[1])
    return ", ".join(f"{cause}={spent_ms:.1f}" for cause, spent_ms in waits).encode("ascii")


def milliseconds(seconds: float) -> int:
    """Returns whole milliseconds, rounded up: a prediction should rather be too long than too short."""
    return math.ceil(seconds * 1000)


_PAIR = b": ".join
_CLOSE = b"connection", b"close"


def response_headers(context: RequestContext, dialect: ApiDialect, *, explain: bool) -> list[Header]:
    """Returns the headers that every response has.

    Args:
        context: The request context.
        dialect: The dialect of the API that was called.
        explain: Whether the caller wants to know what it waited for.
    """
    headers = [(b"x-request-id", context.request_id.encode("ascii")), *dialect.head(context)]
    if context.clamped_max_tokens is not None:
        headers += clamped_headers(context.clamped_max_tokens)
    return headers + timing_headers(context, explain=explain)


def response_head_lines(context: RequestContext, dialect: ApiDialect, *, explain: bool) -> bytes | None:
    """Returns the response headers as encoded lines, as `response_headers` gives them."""
    if explain or dialect is not OPENAI or (lines := _usual_lines(context)) is None:
        return encode_lines(response_headers(context, dialect, explain=explain))
    return lines


def encode_lines(headers: Sequence[Header]) -> bytes | None:
    """Returns the headers as encoded lines; None: ASGI's `send` has to write them.

    This is so if a value contains a line break, or a header says that the connection is closed.
    """
    lines = b"\r\n".join([*map(_PAIR, headers), b""])
    sound = lines.count(b"\n") == len(headers) == lines.count(b"\r")
    return lines if sound and _CLOSE not in headers else None


def _usual_lines(context: RequestContext) -> bytes | None:
    """Returns the header lines by the template; None: the context does not fit the template."""
    rate_limits, position, priority = context.rate_limits, context.predicted_position, context.priority
    request = context.request
    if rate_limits is None or position is None or priority is None or request is None or not context.model:
        return None
    requests, tokens = rate_limits.requests, rate_limits.tokens
    if requests is None or tokens is None or context.clamped_max_tokens is not None or context.selection is not None:
        return None
    if (
        context.ignored_fields
        or context.degraded
        or context.fallbacks
        or context.rejected_answers
        or context.hedged
        or context.served_region is not None
        or context.arm is not None
        or context.relaxed
    ):
        return None
    if (cache := context.cache) is None:
        cached = b""
    elif cache.age_s is not None or cache.semantic_state:
        return None
    else:
        cached = _CACHED[cache.status, cache.key != ""].replace(_KEY, cache.key.encode("ascii"))
    lines: bytes = _USUAL.fill(
        (
            context.request_id.encode("ascii"),
            *(requests.capacity, max(0, requests.remaining), span_of(requests.reset_s)),
            *(tokens.capacity, max(0, tokens.remaining), span_of(tokens.reset_s)),
            *(position.position, milliseconds(position.wait_s), milliseconds(position.ttft_s)),
            _UNFIT.sub(b"?", request.model[:_LONGEST_MODEL_NAME].encode("utf-8", "replace")),
            priority.encode("ascii"),
        )
    )
    return lines + cached


def _usual_form() -> JsonTemplate:
    context = RequestContext("an-id", 0.0, priority=PriorityClass.STANDARD, model="a-model")
    context.request = InferenceRequest("a-name", [], SamplingParams(0, 0))
    context.rate_limits = RateLimitStatus(CounterState(1001, 1002, 0.301), CounterState(1003, 1004, 0.302))
    context.predicted_position = QueuePosition(1005, 2.0055, 2.0065)
    lines = encode_lines(response_headers(context, OPENAI, explain=False))
    assert lines is not None, "these are"
    standing = (b"1001", b"1002", b"301ms", b"1003", b"1004", b"302ms")
    return JsonTemplate(lines, (b"an-id", *standing, b"1005", b"2006", b"2007", b"a-name", b"standard"))


def _cache_form(status: CacheStatus, *, has_key: bool) -> bytes:
    lines = encode_lines(_cache_headers(CacheResult(status, _KEY.decode() if has_key else "")))
    assert lines is not None, "these are"
    return lines


_USUAL = _usual_form()
_KEY = b"a-key"
_CACHED = {
    (status, has_key): _cache_form(status, has_key=has_key) for status in CacheStatus for has_key in (True, False)
}
"""Last lines of a usual head where there is a cache of answers; the name of the answer stands for the mark in them."""
