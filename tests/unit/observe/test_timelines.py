"""What is kept of the last requests."""

import gc
from types import FunctionType, ModuleType

import pytest

from maitred.core.context import Outcome, RequestContext
from maitred.core.errors import ResourceNotFound
from maitred.core.inference import InferenceRequest
from maitred.core.request import SamplingParams
from maitred.core.timeline import SpanName
from maitred.observe.timelines import TimelineBuffer, request_parameters
from maitred.wire.admin.responses import encode
from tests.support.clock import FakeClock

SECRET = "the launch code is 0000"
ASK = InferenceRequest(
    model="chat", prompts=[SECRET], sampling=SamplingParams(max_tokens=0, seed=0, temperature=0.2), user=SECRET
)


def ended(request_id="req-1", ask=ASK):
    context = RequestContext(request_id, 100.0, route="/v1/completions", model="m", request=ask)
    context.timeline.mark(SpanName.PLAN, 100.5, prompt_tokens=7)
    context.timeline.begin(SpanName.ATTEMPT, 101.0, replica="local")
    context.timeline.mark(SpanName.SETTLEMENT, 102.0, cost_usd=0.25)
    context.first_token_s = 101.25
    context.close(Outcome.CANCELLED, 200, 102.5)
    return context


def test_a_timeline_begins_with_the_arrival_of_the_request():
    timelines = TimelineBuffer(8, FakeClock())
    timelines.on_request_end(ended())
    timeline = timelines.get("req-1")
    assert (timeline.duration_ms, timeline.ttft_ms, timeline.cost_usd) == (2500.0, 1250.0, 0.25)
    assert [(span.name, span.at_ms, span.took_ms) for span in timeline.chapters] == [
        ("plan", 500.0, 0.0),
        ("attempt", 1000.0, None),
        ("settlement", 2000.0, 0.0),
    ]
    assert timeline.chapters[0].facts == {"prompt_tokens": 7}


def test_a_refusal_names_the_limit():
    timelines = TimelineBuffer(8, FakeClock())
    context = ended()
    context.refused_by = "requests_per_minute"
    timelines.on_request_end(context)
    assert timelines.get("req-1").refused_by == "requests_per_minute"


def held_by(thing):
    """All objects that it keeps alive, but for what belongs to the program."""
    seen, left = {}, [thing]
    while left:
        one = left.pop()
        if id(one) not in seen and not isinstance(one, type | ModuleType | FunctionType | FakeClock):
            seen[id(one)] = one
            left += gc.get_referents(one)
    return seen.values()


def test_no_text_of_the_request_is_kept():
    timelines = TimelineBuffer(8, FakeClock())
    context = ended()
    context.gaps_s = [0.1234]
    context.listener = context.position = object()
    timelines.on_request_end(context)
    assert SECRET not in encode(timelines.get("req-1")).decode()
    held = held_by(timelines)
    assert any(thing is context.timeline for thing in held), "it looks far enough"
    for gone in (SECRET, context, context.request, context.gaps_s, context.listener):
        assert not any(thing is gone for thing in held)


def test_only_so_many_are_kept_the_latest_of_an_id():
    timelines = TimelineBuffer(2, FakeClock())
    for name in ("a", "b", "a", "c"):
        timelines.on_request_end(ended(name))
    assert [head.id for head in timelines.latest()] == ["c", "a"]
    assert [head.id for head in timelines.latest(1)] == ["c"]
    with pytest.raises(ResourceNotFound, match="the last 2"):
        timelines.get("b")


def test_what_asks_no_model_is_not_kept_nor_anything_if_nothing_shall_be():
    timelines = TimelineBuffer(2, FakeClock())
    timelines.on_request_end(ended("a", ask=None))
    assert timelines.latest() == []
    nothing = TimelineBuffer(0, FakeClock())
    nothing.on_request_end(ended())
    assert nothing.latest() == []


def test_parameters_that_were_set_are_shown():
    assert request_parameters(ASK) == {"temperature": 0.2, "stream": True}
    left_open = InferenceRequest(
        model="m", prompts=[""], sampling=ASK.sampling, unset_fields=frozenset({"temperature"}), whole=True
    )
    assert request_parameters(left_open) == {}


def test_stop_strings_are_counted_and_not_kept():
    timelines, stop = TimelineBuffer(2, FakeClock()), "a word of the client's"
    timelines.on_request_end(ended(ask=InferenceRequest(model="m", prompts=[""], sampling=ASK.sampling, stops=(stop,))))
    assert timelines.get("req-1").parameters["stops"] == 1
    assert not any(thing is stop for thing in held_by(timelines))
