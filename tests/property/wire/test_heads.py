"""What the form of the usual head writes is, byte for byte, what the headers make."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.api.dialect import ANTHROPIC, OPENAI
from maitred.api.response_head import encode_lines, response_head_lines, response_headers
from maitred.core.context import CacheResult, CacheStatus, ModelSelection, RateLimitStatus, RequestContext
from maitred.core.counters import CounterState
from maitred.core.flow import PriorityClass, QueuePosition
from maitred.core.inference import InferenceRequest
from maitred.core.request import SamplingParams

counts = st.integers(-5, 10**9)
seconds = st.floats(-1, 10**5)
readings = st.none() | st.builds(CounterState, counts, counts, seconds)
caches = st.none() | st.builds(
    CacheResult,
    st.sampled_from(CacheStatus),
    st.sampled_from(["", "0123456789abcdef", "a-key"]),
    st.none() | st.floats(-1, 10**9),
    st.sampled_from(["", "shadow"]),
    st.none() | st.floats(-1, 1),
    st.none() | st.floats(0, 1),
)
contexts = st.builds(
    RequestContext,
    request_id=st.sampled_from(["req-1", "a:b"]),
    started_s=st.just(0.0),
    model=st.sampled_from(["", "m", "é\n"]),
    selection=st.none() | st.just(ModelSelection("auto", "m", "small")),
    rate_limits=st.none() | st.builds(RateLimitStatus, readings, readings),
    clamped_max_tokens=st.none() | st.just(7),
    priority=st.none() | st.sampled_from(PriorityClass),
    predicted_position=st.none() | st.builds(QueuePosition, st.integers(0, 10**6), seconds, seconds),
    degraded=st.lists(st.just("max_tokens=64"), max_size=1),
    fallbacks=st.lists(st.just("general=big"), max_size=1),
    hedged=st.sampled_from(["", "first"]),
    cache=caches,
)
usual = st.builds(
    RequestContext,
    request_id=st.just("req-1"),
    started_s=st.just(0.0),
    model=st.just("m"),
    request=st.just(InferenceRequest("é", [], SamplingParams(0, 0))),
    rate_limits=st.builds(RateLimitStatus, *[st.builds(CounterState, counts, counts, seconds)] * 2),
    priority=st.sampled_from(PriorityClass),
    predicted_position=st.builds(QueuePosition, st.integers(0, 10**6), seconds, seconds),
    cache=caches,
)


@given(context=usual | contexts, explain=st.booleans())
def test_the_form_writes_what_the_headers_make(context, explain):
    assert response_head_lines(context, OPENAI, explain=explain) == encode_lines(
        response_headers(context, OPENAI, explain=explain)
    )


@given(context=usual)
def test_another_api_has_its_own(context):
    lines = response_head_lines(context, ANTHROPIC, explain=False)
    assert lines is not None
    assert b"\r\nrequest-id: req-1\r\n" in lines
    assert b"anthropic-ratelimit-requests-limit: " in lines
    assert b"x-ratelimit-" not in lines


@given(
    headers=st.lists(st.tuples(st.sampled_from([b"x-a", b"connection"]), st.sampled_from([b"1", b"close", b"a\r\nb"])))
)
def test_lines_are_made_of_headers_that_are_lines(headers):
    lines = encode_lines(headers)
    unsound = any(b"\n" in value for _, value in headers) or (b"connection", b"close") in headers
    assert (lines is None) == unsound
    if lines is not None:
        assert [tuple(line.split(b": ", 1)) for line in lines.splitlines()] == headers
