"""Every class of the error tree as HTTP."""

import json

import pytest

from maitred.api.errors import body_of, headers_of, public
from maitred.core import errors
from tests.openai_schemas import validate


def tree(kind=errors.MaitredError):
    return [kind, *(deeper for sub in kind.__subclasses__() for deeper in tree(sub))]


@pytest.mark.parametrize("kind", tree(), ids=lambda kind: kind.__name__)
def test_every_error_has_openais_shape(kind):
    error = public(kind(param="x"), "req-1")
    body = json.loads(body_of(error))
    validate("ErrorResponse", body)
    assert 400 <= error.http_status < 600
    assert body["error"]["code"] == error.code
    assert body["error"]["message"].endswith(".")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.InvalidRequest(), "invalid_request_error"),
        (errors.ModelNotFound(), "invalid_request_error"),
        (errors.Saturated(), "rate_limit_error"),
        (errors.ReplicaLost(), "server_error"),
        (errors.Draining(), "server_error"),
        (errors.Bug(), "server_error"),
    ],
)
def test_types(error, kind):
    assert json.loads(body_of(error))["error"]["type"] == kind


def test_the_time_to_come_back_is_never_too_early():
    assert headers_of(errors.Saturated(retry_after_s=2.0001)) == [(b"retry-after", b"3"), (b"retry-after-ms", b"2001")]
    assert headers_of(errors.Saturated(retry_after_s=0.0)) == [(b"retry-after", b"1"), (b"retry-after-ms", b"0")]
    assert headers_of(errors.Saturated()) == []


@pytest.mark.parametrize(
    "error", [KeyError("secret"), errors.ProtocolViolation("secret"), errors.ConfigInvalid("secret")]
)
def test_what_is_ours_to_mend_is_not_told(error, caplog):
    shown = public(error, "req-1")
    assert shown.http_status == 500
    assert "secret" not in body_of(shown).decode()
    assert "req-1" in shown.message
    assert "req-1" in caplog.text
