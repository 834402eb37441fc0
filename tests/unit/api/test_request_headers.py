"""What the headers of a request say of its urgency, its session and caches."""

import pytest

from maitred.api.headers import Headers, apply_request_headers, retries_in
from maitred.core.errors import InvalidRequest
from maitred.core.inference import CacheControl, InferenceRequest
from maitred.core.request import SamplingParams


def read(priority=None, **headers):
    given = Headers([(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()])
    ask = InferenceRequest("m", ["x"], SamplingParams(max_tokens=1, seed=0), priority=priority)
    return apply_request_headers(ask, given, retries=2)


def test_a_request_that_says_nothing_asks_for_nothing():
    ask = read()
    assert (ask.priority, ask.ttft_in_s, ask.deadline_in_s, ask.partial, ask.retries) == (None, None, None, False, 2)
    assert ask.itl_objective_s is None


def test_milliseconds_become_seconds():
    ask = read(x_maitred_ttft_ms="250", x_maitred_deadline_ms="1500.5", x_maitred_partial="TRUE")
    assert (ask.ttft_in_s, ask.deadline_in_s, ask.partial) == (0.25, 1.5005, True)
    assert read(x_maitred_partial="0").partial is False
    assert read(x_maitred_itl_ms="40").itl_objective_s == 0.04


def test_who_would_rather_be_refused_says_so():
    assert read().degradable
    assert not read(x_maitred_no_degradation="true").degradable


@pytest.mark.parametrize(
    ("value", "priority"),
    [("1", 1), (" 10 ", 10), ("interactive", 10), ("Standard", 7), ("batch", 4), ("BACKGROUND", 2)],
)
def test_a_priority_is_a_number_or_a_class(value, priority):
    assert read(x_maitred_priority=value).priority == priority


def test_the_header_wins_over_the_body():
    assert read(9).priority == 9
    assert read(9, x_maitred_priority="2").priority == 2


@pytest.mark.parametrize("value", ["", "0", "11", "-1", "1.5", "urgent", "٣", "1" * 30])
def test_nonsense_for_a_priority_is_refused(value):
    with pytest.raises(InvalidRequest, match="from 1 to 10") as caught:
        read(x_maitred_priority=value)
    assert caught.value.param == "x-maitred-priority"


@pytest.mark.parametrize("name", ["x-maitred-ttft-ms", "x-maitred-itl-ms", "x-maitred-deadline-ms"])
@pytest.mark.parametrize("value", ["", "0", "-5", "nan", "inf", "soon", "1e300"])
def test_nonsense_for_a_time_is_refused(name, value):
    with pytest.raises(InvalidRequest, match="number of milliseconds") as caught:
        read(**{name: value})
    assert caught.value.param == name


def test_nonsense_for_a_flag_is_refused():
    with pytest.raises(InvalidRequest, match="must be true or false; got 'maybe'") as caught:
        read(x_maitred_partial="maybe")
    assert caught.value.param == "x-maitred-partial"


@pytest.mark.parametrize(("value", "retries"), [(None, 0), ("0", 0), ("2", 2), ("x", 0), ("-1", 0), ("9" * 5000, 0)])
def test_the_count_of_a_client_is_taken_only_where_it_can_be_read(value, retries):
    sent = [] if value is None else [(b"x-stainless-retry-count", value.encode())]
    assert retries_in(Headers(sent)) == retries


def test_a_session_is_named_by_the_header():
    assert read().session is None
    assert read(x_session_id="s-1").session == "s-1"
    assert read(x_session_id="").session is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-maitred-priority", "3"),
        ("x-maitred-ttft-ms", "5"),
        ("x-maitred-itl-ms", "5"),
        ("x-maitred-deadline-ms", "5"),
        ("x-maitred-partial", "true"),
        ("x-maitred-no-degradation", "true"),
        ("x-maitred-escalate", "false"),
        ("x-maitred-local-only", "true"),
        ("x-maitred-region", "eu"),
        ("x-maitred-max-cost-usd", "1"),
        ("x-session-id", "s"),
        ("cache-control", "no-store"),
    ],
)
def test_each_header_alone_is_heard(name, value):
    assert read(**{name: value}) != read()


def test_directives_for_caches_in_several_lines_add_to_the_body():
    lines = [(b"cache-control", b"No-Cache"), (b"accept", b"*/*"), (b"cache-control", b"max-age=60, only-if-cached")]
    body = InferenceRequest("m", ["x"], SamplingParams(0, 0), cache=CacheControl(no_store=True, max_age_s=90, ttl_s=5))
    asked = apply_request_headers(body, Headers(lines))
    assert asked.cache == CacheControl(no_cache=True, no_store=True, only_if_cached=True, ttl_s=5, max_age_s=60)
    assert apply_request_headers(body, Headers([(b"x-session-id", b"s")])).cache is body.cache


def test_a_malformed_directive_is_refused():
    with pytest.raises(InvalidRequest, match="max-age") as caught:
        read(cache_control="max-age=soon")
    assert caught.value.param == "cache-control"
