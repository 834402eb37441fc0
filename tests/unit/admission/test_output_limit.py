"""What `max_tokens` is."""

import pytest

from maitred.admission.limit_plans import OutputLimit, output_limit, per_request_limits
from maitred.admission.policy.rules import LimitRule
from maitred.admission.request import AdmissionRequest
from maitred.core.errors import ContextLengthExceeded, InvalidRequest
from maitred.core.tenancy import ANONYMOUS
from tests.support.admission_services import limit


def bounds(**limits):
    return per_request_limits(
        [LimitRule("tenant:acme", limit("tenant:acme", kind, value)) for kind, value in limits.items()]
    )


def request(prompt_tokens, max_tokens, window_left, **settings):
    return AdmissionRequest(
        principal=ANONYMOUS,
        request_id="req",
        route="/v1/completions",
        model="tiny",
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        window_left=window_left,
        **settings,
    )


@pytest.mark.parametrize(
    ("named", "default", "limits", "expected"),
    [
        (50, None, {}, OutputLimit(50, 50)),
        (None, None, {}, OutputLimit(90, 90)),
        (None, 20, {}, OutputLimit(20, 20)),
        (None, 500, {}, OutputLimit(90, 90)),
        (50, 20, {}, OutputLimit(50, 50)),
        (50, None, {"output_tokens": 30}, OutputLimit(50, 30)),
        (20, None, {"output_tokens": 30}, OutputLimit(20, 20)),
        (None, None, {"output_tokens": 30}, OutputLimit(90, 30)),
        (None, None, {"context_tokens": 70}, OutputLimit(60, 60)),
        (60, None, {"context_tokens": 70}, OutputLimit(60, 60)),
        (None, 20, {"context_tokens": 70}, OutputLimit(20, 20)),
        (None, None, {"context_tokens": 70, "output_tokens": 40}, OutputLimit(60, 40)),
        (None, None, {"context_tokens": 500}, OutputLimit(90, 90)),
    ],
)
def test_lengths(named, default, limits, expected):
    assert output_limit(request(10, named, 90), bounds(**limits), default) == expected


def test_a_prompt_over_the_limit_is_refused():
    with pytest.raises(
        ContextLengthExceeded, match=r"10 tokens .* tenant acme may use 10 for both .* at most 9"
    ) as caught:
        output_limit(request(10, None, 90, prompt_param="messages"), bounds(context_tokens=10), None)
    assert caught.value.param == "messages"


def test_a_length_over_the_limit_is_refused_if_it_was_named():
    with pytest.raises(ContextLengthExceeded, match="Lower max_completion_tokens to at most 60") as caught:
        output_limit(request(10, 61, 90, max_tokens_param="max_completion_tokens"), bounds(context_tokens=70), None)
    assert caught.value.param == "max_completion_tokens"


def test_the_refusal_names_the_model_of_the_limit():
    rule = LimitRule("*", limit("*", "context_tokens", 5, model="tiny"))
    with pytest.raises(ContextLengthExceeded, match="this installation may use 5 for both together of tiny"):
        output_limit(request(10, None, 90), per_request_limits([rule]), None)


def test_the_least_length_must_be_possible():
    with pytest.raises(InvalidRequest, match=r"min_tokens is 31, but .* 30") as caught:
        output_limit(request(10, 50, 90, min_tokens=31), bounds(output_tokens=30), None)
    assert caught.value.param == "min_tokens"
    assert output_limit(request(10, 50, 90, min_tokens=30), bounds(output_tokens=30), None).most == 30


def test_the_least_length_overrides_the_default():
    assert output_limit(request(10, None, 90, min_tokens=30), bounds(), 20) == OutputLimit(30, 30)


def test_no_prompt_is_short_enough_for_a_limit_of_one_token():
    with pytest.raises(ContextLengthExceeded, match=r"may use 1 for both together\. Have it raised\.$"):
        output_limit(request(1, None, 90), bounds(context_tokens=1), None)


def test_the_longest_prompt_counts_against_the_context():
    with pytest.raises(ContextLengthExceeded, match=r"The prompt has 40 tokens .* at most 30"):
        output_limit(request(60, 31, 90, longest_prompt=40), bounds(context_tokens=70), None)
    assert output_limit(request(60, None, 90, longest_prompt=40), bounds(context_tokens=70), None).wanted == 30
