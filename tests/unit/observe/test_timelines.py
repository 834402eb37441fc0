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
    tally = RequestContext(request_id, 100.0, route="/v1/completions", model="m", request=ask)
    tally.timeline.mark(SpanName.PLAN, 100.5, prompt_tokens=7)
    tally.timeline.begin(SpanName.ATTEMPT, 101.0, replica="local")
    tally.timeline.mark(SpanName.SETTLEMENT, 102.0, cost_usd=0.25)
    tally.first_token_s = 101.25
    tally.close(Outcome.CANCELLED, 200, 102.5)
    return tally


def test_it_is_told_from_the_arrival_of_the_request():
    stories = TimelineBuffer(8, FakeClock())
    stories.on_request_end(ended())
    story = stories.get("req-1")
    assert (story.duration_ms, story.ttft_ms, story.cost_usd) == (2500.0, 1250.0, 0.25)
    assert [(one.name, one.at_ms, one.took_ms) for one in story.chapters] == [
        ("plan", 500.0, 0.0),
        ("attempt", 1000.0, None),
        ("settlement", 2000.0, 0.0),
    ]
    assert story.chapters[0].facts == {"prompt_tokens": 7}


def test_a_refusal_names_the_limit():
    stories = TimelineBuffer(8, FakeClock())
    tally = ended()
    tally.refused_by = "requests_per_minute"
    stories.on_request_end(tally)
    assert stories.get("req-1").refused_by == "requests_per_minute"


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
    stories = TimelineBuffer(8, FakeClock())
    tally = ended()
    tally.gaps_s = [0.1234]
    tally.listener = tally.position = object()
    stories.on_request_end(tally)
    assert SECRET not in encode(stories.get("req-1")).decode()
    held = held_by(stories)
    assert any(one is tally.timeline for one in held), "it looks far enough"
    for gone in (SECRET, tally, tally.request, tally.gaps_s, tally.listener):
        assert not any(one is gone for one in held)


def test_only_so_many_are_kept_the_latest_of_an_id():
    stories = TimelineBuffer(2, FakeClock())
    for name in ("a", "b", "a", "c"):
        stories.on_request_end(ended(name))
    assert [head.id for head in stories.latest()] == ["c", "a"]
    with pytest.raises(ResourceNotFound, match="the last 2"):
        stories.get("b")


def test_what_asks_no_model_is_not_kept_nor_anything_if_nothing_shall_be():
    stories = TimelineBuffer(2, FakeClock())
    stories.on_request_end(ended("a", ask=None))
    assert stories.latest() == []
    nothing = TimelineBuffer(0, FakeClock())
    nothing.on_request_end(ended())
    assert nothing.latest() == []


def test_parameters_are_told_that_were_set():
    assert request_parameters(ASK) == {"temperature": 0.2, "stream": True}
    left_open = InferenceRequest(
        model="m", prompts=[""], sampling=ASK.sampling, unset_fields=frozenset({"temperature"}), whole=True
    )
    assert request_parameters(left_open) == {}


def test_stop_strings_are_counted_and_not_kept():
    stories, stop = TimelineBuffer(2, FakeClock()), "a word of the client's"
    stories.on_request_end(ended(ask=InferenceRequest(model="m", prompts=[""], sampling=ASK.sampling, stops=(stop,))))
    assert stories.get("req-1").parameters["stops"] == 1
    assert not any(one is stop for one in held_by(stories))
