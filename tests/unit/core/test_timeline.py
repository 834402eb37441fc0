"""How the timeline of a request is recorded."""

import asyncio
from contextlib import suppress

import pytest

from maitred.core.errors import ReplicaLost
from maitred.core.timeline import MAX_SPANS, RequestTimeline, SpanName
from maitred.core.trace_context import TraceContext
from tests.support.clock import FakeClock


def test_a_span_is_as_long_as_its_block():
    clock, timeline = FakeClock(10.0), RequestTimeline()
    with timeline.span(SpanName.ADMISSION, clock.monotonic_s, asked=3) as span:
        clock.now_s = 12.0
        span.facts["max_tokens"] = 5
    assert (span.began_s, span.ended_s, span.error) == (10.0, 12.0, "")
    assert span.facts == {"asked": 3, "max_tokens": 5}
    assert timeline.spans == [span]


@pytest.mark.parametrize(
    ("error", "code"),
    [(ReplicaLost(), "replica_lost"), (asyncio.CancelledError(), "cancelled"), (ValueError("secret"), "ValueError")],
)
def test_what_leaves_the_block_is_its_error_by_name(error, code):
    clock, timeline = FakeClock(), RequestTimeline()
    with pytest.raises(type(error)), timeline.span(SpanName.ATTEMPT, clock.monotonic_s):
        raise error
    assert timeline.spans[0].error == code
    assert timeline.spans[0].ended_s is not None


def test_a_span_can_be_recorded_after_its_end():
    clock, timeline, meanwhile = FakeClock(1.0), RequestTimeline(), RequestTimeline()
    for error in (None, ReplicaLost(), asyncio.CancelledError()):
        telling = meanwhile.span(SpanName.PLAN, clock.monotonic_s, model="a")
        with suppress(ReplicaLost, asyncio.CancelledError), telling:
            if error is not None:
                raise error
        if error is None:
            timeline.record(SpanName.PLAN, 1.0, 1.0, {"model": "a"})
        else:
            timeline.fail(SpanName.PLAN, 1.0, 1.0, {"model": "a"}, error)
    assert timeline.spans == meanwhile.spans


def test_of_several_attempts_the_latest_that_runs_is_meant():
    timeline = RequestTimeline()
    first = timeline.begin(SpanName.ATTEMPT, 1.0)
    second = timeline.begin(SpanName.ATTEMPT, 2.0)
    second.end(3.0)
    assert timeline.running(SpanName.ATTEMPT) is first
    first.end(4.0, "replica_lost")
    first.end(5.0)
    assert (first.ended_s, first.error) == (4.0, "replica_lost"), "what has ended stays as it is"
    assert timeline.running(SpanName.ATTEMPT) is None


def test_it_does_not_grow_without_end():
    timeline = RequestTimeline()
    for number in range(MAX_SPANS + 10):
        timeline.mark(SpanName.ATTEMPT, float(number))
    assert len(timeline.spans) == MAX_SPANS


def test_a_server_that_works_for_a_span_gets_its_id_once_there_is_a_trace():
    timeline = RequestTimeline()
    span = timeline.begin(SpanName.ATTEMPT, 1.0)
    assert timeline.context_at(span, lambda: "3" * 16) is None
    timeline.trace = TraceContext("1" * 32, "2" * 16, sampled=True, state="a=b")
    context = timeline.context_at(span, lambda: "3" * 16)
    assert context == TraceContext("1" * 32, "3" * 16, sampled=True, state="maitred=usage,a=b")
    assert span.span_id == "3" * 16
