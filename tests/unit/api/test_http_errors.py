"""Every class of the error tree as HTTP."""

import json

import msgspec
import pytest

from maitred.api.dialect import (
    ANTHROPIC,
    OPENAI,
    clamped_headers,
    error_body,
    error_headers,
    rate_limit_headers,
    to_public_error,
)
from maitred.core import errors
from maitred.core.context import RateLimitStatus
from maitred.core.counters import CounterState
from maitred.wire.error_codec import EncodedError, decode_error, encode_error
from tests.support.openai_schemas import validate


def tree(kind=errors.MaitredError):
    return [kind, *(deeper for sub in kind.__subclasses__() for deeper in tree(sub))]


def reached(kind=errors.RateLimited, limit="tokens_per_minute", retry_after_s=None, reset_s=59.2101):
    return kind(
        "Too fast.",
        subject="tenant:acme",
        limit=limit,
        value=60_000,
        reading=CounterState(60_000, -10, reset_s, used=60_010),
        retry_after_s=retry_after_s,
    )


@pytest.mark.parametrize(
    ("error", "openai", "anthropic"),
    [
        (
            errors.ContextLengthExceeded("Ours.", window=8192, prompt_tokens=9000),
            "This model's maximum context length is 8192 tokens. Ours.",
            "prompt is too long: 9000 tokens > 8192 maximum. Ours.",
        ),
        (
            errors.ContextLengthExceeded("Ours.", window=8192, prompt_tokens=9000, max_tokens=10),
            "This model's maximum context length is 8192 tokens. Ours.",
            "prompt is too long: 9000 tokens > 8192 maximum. Ours.",
        ),
        (
            errors.ContextLengthExceeded("Ours.", window=8192, prompt_tokens=8000, max_tokens=1000),
            "This model's maximum context length is 8192 tokens. Ours.",
            "input length and `max_tokens` exceed context limit: 8000 + 1000 > 8192. Ours.",
        ),
        (
            errors.ContextLengthExceeded("Ours."),
            "This model's maximum context length is exceeded. Ours.",
            "prompt is too long. Ours.",
        ),
        (
            errors.ContextLengthExceeded("this model's MAXIMUM context length is 5 tokens."),
            "this model's MAXIMUM context length is 5 tokens.",
            "prompt is too long. this model's MAXIMUM context length is 5 tokens.",
        ),
        (
            errors.ContextLengthExceeded("prompt is too long: 3 tokens > 2 maximum"),
            "This model's maximum context length is exceeded. prompt is too long: 3 tokens > 2 maximum",
            "prompt is too long: 3 tokens > 2 maximum",
        ),
        (errors.InvalidRequest("Ours."), "Ours.", "Ours."),
    ],
)
def test_a_window_that_is_exceeded_is_told_in_the_words_that_clients_know(error, openai, anthropic):
    assert json.loads(OPENAI.error(error, "req-1")[1])["error"]["message"] == openai
    assert json.loads(ANTHROPIC.error(error, "req-1")[1])["error"]["message"] == anthropic
    passed = decode_error(msgspec.msgpack.decode(msgspec.msgpack.encode(encode_error(error)), type=EncodedError))
    assert (type(passed), vars(passed)) == (type(error), vars(error))


@pytest.mark.parametrize("kind", tree(), ids=lambda kind: kind.__name__)
def test_every_error_has_openais_shape(kind):
    error = to_public_error(reached(kind) if issubclass(kind, errors.LimitReached) else kind(param="x"), "req-1")
    body = json.loads(error_body(error))
    validate("ErrorResponse", body)
    assert 400 <= error.http_status < 600
    assert body["error"]["code"] == error.code
    assert body["error"]["message"].endswith(".")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.InvalidRequest(), "invalid_request_error"),
        (errors.ModelNotFound(), "invalid_request_error"),
        (errors.NotCached(), "invalid_request_error"),
        (errors.Unauthenticated(), "invalid_request_error"),
        (errors.Saturated(), "rate_limit_error"),
        (reached(), "rate_limit_error"),
        (reached(errors.QuotaExceeded), "insufficient_quota"),
        (errors.ReplicaLost(), "server_error"),
        (errors.Draining(), "server_error"),
        (errors.Bug(), "server_error"),
    ],
)
def test_types(error, kind):
    assert json.loads(error_body(error))["error"]["type"] == kind


def test_a_client_that_takes_only_kept_answers_is_not_to_retry():
    error = errors.NotCached()
    assert OPENAI.error(error, "req-1")[0] == ANTHROPIC.error(error, "req-1")[0] == 504
    assert error_headers(error) == [(b"x-should-retry", b"false")]
    assert not error.retryable
    passed = decode_error(msgspec.msgpack.decode(msgspec.msgpack.encode(encode_error(error)), type=EncodedError))
    assert (type(passed), vars(passed)) == (errors.NotCached, vars(error))


def test_the_time_to_come_back_is_never_too_early():
    assert error_headers(errors.Saturated(retry_after_s=2.0001)) == [
        (b"retry-after", b"3"),
        (b"retry-after-ms", b"2001"),
    ]
    assert error_headers(errors.Saturated(retry_after_s=0.0)) == [(b"retry-after", b"1"), (b"retry-after-ms", b"0")]
    assert error_headers(errors.Saturated()) == []


def test_a_limit_that_refuses_says_which_it_is():
    assert json.loads(error_body(reached()))["error"]["limit"] == {
        "scope": "tenant:acme",
        "limit": "tokens_per_minute",
        "value": 60_000,
        "used": 60_010,
        "remaining": 0,
        "reset_s": 59.21,
    }
    assert json.loads(error_body(reached(limit="usd_total", reset_s=0.0)))["error"]["limit"]["reset_s"] is None
    assert "limit" not in json.loads(error_body(errors.Saturated()))["error"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (reached(retry_after_s=2.0), False),
        (reached(retry_after_s=None), True),
        (reached(errors.QuotaExceeded, "usd_per_day", 3600.0), True),
        (errors.Saturated(retry_after_s=1.0), False),
    ],
)
def test_errors_say_whether_retrying_can_help(error, expected):
    assert ((b"x-should-retry", b"false") in error_headers(error)) is expected


def test_an_unknown_caller_gets_the_authentication_header():
    assert (b"www-authenticate", b"Bearer") in error_headers(errors.Unauthenticated())


def test_the_standing_is_written_as_openai_writes_it():
    standing = RateLimitStatus(requests=CounterState(60, 59, 1.0), tokens=CounterState(60_000, -3, 360.0))
    assert rate_limit_headers(standing) == [
        (b"x-ratelimit-limit-requests", b"60"),
        (b"x-ratelimit-remaining-requests", b"59"),
        (b"x-ratelimit-reset-requests", b"1s"),
        (b"x-ratelimit-limit-tokens", b"60000"),
        (b"x-ratelimit-remaining-tokens", b"0"),
        (b"x-ratelimit-reset-tokens", b"6m0s"),
    ]
    assert [name for name, _ in rate_limit_headers(RateLimitStatus(tokens=CounterState(1, 1, 0)))] == [
        b"x-ratelimit-limit-tokens",
        b"x-ratelimit-remaining-tokens",
        b"x-ratelimit-reset-tokens",
    ]
    assert rate_limit_headers(None) == rate_limit_headers(RateLimitStatus()) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, b"0s"), (0, b"0s"), (0.0004, b"1ms"), (0.02, b"20ms"), (0.9999, b"1s"), (1.5, b"1.5s"),
        (59.123, b"59.123s"), (59.9999, b"1m0s"),
        (90.5, b"1m30.5s"), (360, b"6m0s"), (3600, b"1h0m0s"), (86_399.9, b"23h59m59.9s"),
    ],
)  # fmt: skip
def test_times_until_a_reset(seconds, text):
    standing = RateLimitStatus(requests=CounterState(1, 0, seconds))
    assert dict(rate_limit_headers(standing))[b"x-ratelimit-reset-requests"] == text


def test_a_clamped_length_is_in_the_headers():
    assert clamped_headers(17) == [(b"x-maitred-max-tokens-clamped", b"17")]
    assert clamped_headers(None) == []


@pytest.mark.parametrize(
    "error", [KeyError("secret"), errors.ProtocolViolation("secret"), errors.ConfigInvalid("secret")]
)
def test_internal_errors_are_logged_and_not_disclosed(error, caplog):
    shown = to_public_error(error, "req-1")
    assert shown.http_status == 500
    assert "secret" not in error_body(shown).decode()
    assert "req-1" in shown.message
    assert "req-1" in caplog.text
