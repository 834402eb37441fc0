"""What the headers of an answer tell of its request."""

import pytest

from maitred.api.response_head import timing_headers
from maitred.core.context import CacheResult, CacheStatus, ModelSelection, RequestContext
from maitred.core.flow import PriorityClass, QueuePosition
from maitred.core.inference import InferenceRequest
from maitred.core.request import SamplingParams


def headers_of(context, *, explain=False):
    headers = timing_headers(context, explain=explain)
    assert len(dict(headers)) == len(headers)
    return {name.decode(): value.decode() for name, value in headers}


def test_a_request_without_a_queue_gets_no_headers():
    assert headers_of(RequestContext("r", 0.0)) == {}


def test_a_prediction_is_rounded_up():
    context = RequestContext("r", 0.0, predicted_position=QueuePosition(3, 1.2001, 1.3), priority=PriorityClass.BATCH)
    assert headers_of(context) == {
        "x-maitred-queue-position": "3",
        "x-maitred-predicted-wait-ms": "1201",
        "x-maitred-predicted-ttft-ms": "1300",
        "x-maitred-priority": "batch",
    }


def test_waits_are_shown_on_request_with_the_longest_first():
    context = RequestContext("r", 0.0, waited_ms={"slots": 0.04, "tenant_share": 120.26})
    assert headers_of(context) == {}
    assert headers_of(context, explain=True) == {"x-maitred-waited": "tenant_share=120.3, slots=0.0"}
    assert headers_of(RequestContext("r", 0.0), explain=True) == {"x-maitred-waited": ""}


def test_what_was_taken_is_named_in_characters_that_a_header_can_hold():
    context = RequestContext("r", 0.0, degraded=["max_tokens=64", "model=klein\r\nx: ü"])
    assert headers_of(context) == {"x-maitred-degraded": "max_tokens=64, model=klein??x: ??"}


def test_keywords_that_were_left_to_the_model_are_named():
    context = RequestContext("r", 0.0, relaxed=["response_format: pattern at #/é", "tools[0]: format at #"])
    assert headers_of(context)["x-maitred-relaxed"] == "response_format: pattern at #/??, tools[0]: format at #"


def test_the_answering_model_is_named_where_the_caller_left_it_open():
    context = RequestContext("req-1", 0.0, model="groß")
    assert headers_of(context) == {}
    context.selection = ModelSelection("auto", "small", "small", 0.1)
    assert headers_of(context) == {"x-maitred-model": "gro??"}, "the one that it went on to, not the first choice"
    assert headers_of(RequestContext("req-2", 0.0, selection=context.selection)) == {}, "none has been reached yet"


def test_the_name_that_was_asked_for_is_told_once_a_model_is_known():
    context = RequestContext("req-1", 0.0, request=InferenceRequest("größer" + "x" * 300, [], SamplingParams(1, 0)))
    assert headers_of(context) == {}
    context.model = "large"
    assert headers_of(context) == {"x-maitred-requested-model": "gr????er" + "x" * 250}


def test_ignored_fields_are_told_within_bounds():
    context = RequestContext("req-1", 0.0, ignored_fields=["user", "a\r\nb", "\ud800"])
    assert headers_of(context) == {"x-maitred-ignored": "user, a??b, ?"}
    context.ignored_fields = ["x" * 99] * 99
    assert headers_of(context) == {"x-maitred-ignored": ", ".join(["x" * 64] * 16 + ["..."])}


@pytest.mark.parametrize(
    ("cache", "headers"),
    [
        (None, {}),
        (CacheResult(CacheStatus.BYPASS), {"x-maitred-cache": "bypass"}),
        (
            CacheResult(CacheStatus.MISS, "0a1b"),
            {"x-maitred-cache": "miss", "x-maitred-cache-key": "0a1b", "x-litellm-cache-key": "0a1b"},
        ),
        (
            CacheResult(CacheStatus.HIT, "0a1b", 59.9),
            {"x-maitred-cache": "hit", "age": "59", "x-maitred-cache-key": "0a1b", "x-litellm-cache-key": "0a1b"},
        ),
        (CacheResult(CacheStatus.HIT, age_s=-0.5), {"x-maitred-cache": "hit", "age": "0"}),
        (
            CacheResult(
                CacheStatus.SEMANTIC, age_s=7, semantic_state="certified", similarity=0.9312, false_hit_bound=4e-3
            ),
            {
                "x-maitred-cache": "semantic",
                "age": "7",
                "x-maitred-cache-state": "certified",
                "x-maitred-cache-similarity": "0.931",
                "x-litellm-semantic-similarity": "0.931",
                "x-maitred-cache-false-hit-bound": "0.00400",
            },
        ),
        (
            CacheResult(CacheStatus.MISS, semantic_state="shadow"),
            {"x-maitred-cache": "miss", "x-maitred-cache-state": "shadow"},
        ),
    ],
)
def test_what_the_cache_did_is_told(cache, headers):
    assert headers_of(RequestContext("r", 0.0, cache=cache)) == headers
