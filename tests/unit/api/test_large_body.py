"""Large bodies: what is counted in them, and what is asked before."""

import gzip
import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.api import large_body
from maitred.api.large_body import (
    LARGE_BODY_BYTES,
    REST_PER_WORK,
    LargeBody,
    LargeBodyReader,
    WorkLimiter,
    check_count,
)
from maitred.core.context import RequestContext
from maitred.core.counters import CounterState
from maitred.core.errors import BodyTooLarge, InvalidRequest, RateLimited

REACHED = RateLimited("No.", subject="*", limit="requests_per_minute", value=1, reading=CounterState(1, 0, 60.0))
JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a",\\[]{}:\n\u00e9', max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(alphabet='k",\\', max_size=3), inner),
    max_leaves=20,
)


def counts(value):
    """Strings, and commas between values."""
    match value:
        case str():
            return 1, 0
        case list():
            inner = [counts(item) for item in value]
        case dict():
            inner = [(1 + counts(item)[0], counts(item)[1]) for item in value.values()]
        case _:
            return 0, 0
    return sum(strings for strings, _ in inner), sum(commas for _, commas in inner) + max(0, len(inner) - 1)


@settings(deadline=None)
@given(value=JSON, step_bytes=st.integers(1, 9), ascii_only=st.booleans())
def test_strings_and_values_are_counted_exactly_wherever_a_step_ends(value, step_bytes, ascii_only):
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    strings, commas = counts(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_body, "_STEP_BYTES", step_bytes)
        for most, name, real in (("MAX_STRINGS", "strings", strings), ("MAX_VALUES", "values", commas)):
            patch.setattr(large_body, "MAX_STRINGS", 1000)
            patch.setattr(large_body, "MAX_VALUES", 1000)
            patch.setattr(large_body, most, real)
            check_count(body)
            if real:
                patch.setattr(large_body, most, real - 1)
                with pytest.raises(InvalidRequest, match=name):
                    check_count(body)


@pytest.mark.parametrize(
    "body",
    [
        lambda: json.dumps({"messages": [{"role": "user", "content": "a"}] * 200_000}).encode(),
        lambda: json.dumps({"metadata": {str(number): "1" for number in range(500_000)}}).encode(),
        lambda: b"[" + b"5," * 2_000_000 + b"5]",
        lambda: b'"' * 10_000_000,
    ],
    ids=["messages", "metadata", "numbers", "quotes"],
)
def test_what_would_take_long_is_refused(body):
    with pytest.raises(InvalidRequest, match="more than"):
        check_count(body())


@pytest.mark.parametrize("body", [b"\\" * 1_000_001, b'\\"' * 1_000_000, b'"' + b"a, " * 1_000_000 + b'"'])
def test_one_long_text_is_one_string(body):
    check_count(body)


def decode(body, *, strict):
    return body, strict


async def test_limits_are_asked_before_anything_is_decoded():
    asked = []

    async def check_limits(context, least_output):
        asked.append((context.request_id, least_output))
        if len(asked) == 1:
            raise REACHED

    large = LargeBody(b"{}", RequestContext("req-1", 0.0), LargeBodyReader(check_limits), least_output=1)
    with pytest.raises(RateLimited):
        await large.decode(None, strict=True)
    assert await large.decode(decode, strict=True) == (b"{}", True)
    assert asked == [("req-1", 1)] * 2


async def test_no_limits_are_asked_where_none_hold():
    async def check_limits(context, least_output):
        raise REACHED

    for reader, least_output in ((LargeBodyReader(check_limits), None), (LargeBodyReader(), 1)):
        large = LargeBody(b"{}", RequestContext("req-1", 0.0), reader, least_output)
        assert await large.decode(decode, strict=False) == (b"{}", False)


@pytest.mark.parametrize("text", [b" " * (LARGE_BODY_BYTES + 1), bytes(range(256)) * 5000], ids=["tiny", "large"])
async def test_limits_are_asked_before_a_large_body_is_decompressed(text):
    async def check_limits(context, least_output):
        raise REACHED

    context, reader = RequestContext("req-1", 0.0), LargeBodyReader(check_limits)
    body = gzip.compress(text)
    with pytest.raises(RateLimited):
        await reader.decompress(body, "gzip", 1 << 24, context, 1)
    assert await reader.decompress(body, "gzip", 1 << 24, context, None) == (text, False)
    with pytest.raises(BodyTooLarge):
        await reader.decompress(body, "gzip", len(text) - 1, context, None)
    small = gzip.compress(text[:LARGE_BODY_BYTES])
    assert await reader.decompress(small, "gzip", 1 << 24, context, 1) == (text[:LARGE_BODY_BYTES], False)


def test_the_thread_rests_between_two_bodies_by_what_the_first_one_took():
    now_s, rests = 0.0, []

    def sleep(seconds):
        nonlocal now_s
        rests.append(seconds)
        now_s += seconds

    rest = WorkLimiter(lambda: now_s, sleep)
    with rest:
        now_s += 2.0
    now_s += 0.5
    with suppress(InvalidRequest), rest:
        now_s += 1.0
        raise InvalidRequest("too many")
    with rest:
        pass
    now_s += 9.0
    with rest:
        pass
    assert rests == [2.0 * REST_PER_WORK - 0.5, 1.0 * REST_PER_WORK]
