"""Bodies and queries of the administration."""

import json

import pytest

from maitred.core.errors import BodyTooLarge, InvalidRequest
from maitred.core.limits import Limit, LimitKind
from maitred.core.tenancy import Scope, Tenant
from maitred.wire.admin import rules
from maitred.wire.admin.decode import MAX_BODY_BYTES, decode_body, decode_query
from maitred.wire.admin.requests import CreateKey, CreateLimit, CreateTenant, RotateKey, UpdateTenant, UsageQuery


def tenant(**fields):
    return rules.to_tenant(decode_body(json.dumps({"id": "acme", **fields}).encode(), CreateTenant))


def limit(**fields):
    body = {"subject": "tenant:acme", "kind": "tokens_per_minute", "value": 100, **fields}
    return rules.to_limit(decode_body(json.dumps(body).encode(), CreateLimit), "lim-1")


def test_a_tenant_with_everything():
    given = {
        "parent": "org",
        "name": "Ünïcode 🚀",
        "weight": 2,
        "models": ["a/b", "c"],
        "priority_ceiling": 7,
        "regions": ["eu-1"],
        "tags": ["local-only"],
        "disabled": True,
    }
    expected = {**given, "models": ("a/b", "c"), "regions": ("eu-1",), "tags": ("local-only",)}
    assert tenant(**given) == Tenant(id="acme", **expected)
    assert tenant() == Tenant(id="acme")
    assert tenant(models=[]).models == ()


def test_changes_tell_null_from_left_out():
    def changes(**fields):
        return rules.tenant_changes(decode_body(json.dumps(fields).encode(), UpdateTenant))

    assert changes() == {}
    assert changes(models=None, tags=[]) == {"models": None, "tags": ()}
    assert changes(name="") == {"name": ""}


@pytest.mark.parametrize(
    ("body", "kind", "param", "message"),
    [
        (
            {"tenant": "a", "scopes": ["inference", "all"]},
            CreateKey,
            "scopes[1]",
            "inference, metrics, admin; got 'all'.",
        ),
        ({"subject": "*", "kind": "usd", "value": 1}, CreateLimit, "kind", "requests_per_minute, tokens_per_minute, "),
        ({"subject": "*", "kind": "` - at `$.x`\n", "value": 1}, CreateLimit, "kind", "got '` - at `$.x`"),
    ],
)
def test_where_there_is_a_choice_it_is_named(body, kind, param, message):
    with pytest.raises(InvalidRequest) as caught:
        decode_body(json.dumps(body).encode(), kind)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param} must be one of ")
    assert message in caught.value.message


TENANT_FAULTS = [
    (
        {"id": "ACME"},
        "id",
        "id must be 1 to 63 lower-case letters, digits, '-' and '_', the first a letter or a digit; got 'ACME'.",
    ),
    ({"id": ""}, "id", "got ''."),
    ({"id": "a" * 64}, "id", "id must be 1 to 63"),
    ({"id": "ä"}, "id", "got 'ä'."),
    ({"id": "a\n"}, "id", "id must be"),
    ({"id": 5}, "id", "id must be a string; got an integer."),
    ({"parent": "acme"}, "parent", "another tenant"),
    ({"parent": "../etc"}, "parent", "parent must be 1 to 63"),
    ({"name": "a\0b"}, "name", "name must be one line of printable text."),
    ({"name": "‮abc"}, "name", "printable"),
    ({"name": "n" * 201}, "name", "name must have at most 200 characters; got 201."),
    ({"name": None}, "name", "name must be a string; got null."),
    ({"weight": 0}, "weight", "weight must be at least 0.001; got 0."),
    ({"weight": -1}, "weight", "weight must be at least 0.001; got -1."),
    ({"weight": 1e9}, "weight", "weight must be at most 1000; got 1e+09."),
    ({"weight": "2"}, "weight", "weight must be a number; got a string."),
    ({"weight": True}, "weight", "weight must be a number; got true or false."),
    ({"models": "m"}, "models", "models must be a list or null; got a string."),
    ({"models": [""]}, "models[0]", "models[0] must not be empty."),
    ({"models": ["m"] * 1001}, "models", "models must have at most 1000 entries; got 1001."),
    ({"models": ["ok", 3]}, "models[1]", "models[1] must be a string; got an integer."),
    ({"priority_ceiling": 0}, "priority_ceiling", "priority_ceiling must be at least 1; got 0."),
    ({"priority_ceiling": 11}, "priority_ceiling", "priority_ceiling must be at most 10; got 11."),
    ({"priority_ceiling": 2.5}, "priority_ceiling", "priority_ceiling must be an integer or null; got a number."),
    ({"regions": ["no blanks"]}, "regions[0]", "regions[0] must be 1 to 63 letters"),
    ({"tags": ["x"] * 65}, "tags", "tags must have at most 64 entries; got 65."),
    ({"disabled": "yes"}, "disabled", "disabled must be true or false; got a string."),
    ({"wieght": 2}, "wieght", "wieght is not a field of this request. Did you mean weight?"),
    ({"admin": True}, "admin", "admin is not a field of this request. Remove it."),
]


@pytest.mark.parametrize(("fields", "param", "message"), TENANT_FAULTS)
def test_faults_of_tenants(fields, param, message):
    with pytest.raises(InvalidRequest) as caught:
        tenant(**fields)
    assert caught.value.param == param
    assert message in caught.value.message


def test_limits_are_kept_in_whole_numbers():
    expected = Limit(id="lim-1", subject="tenant:acme", kind=LimitKind.TOKENS_PER_MINUTE, value=100)
    assert limit() == limit(value=100.0) == expected
    assert limit(kind="usd_per_month", value=0.1).value == 100_000_000
    assert limit(kind="usd_total", value=9_000_000).value == 9_000_000_000_000_000
    assert limit(kind="usd_per_day", value=1e-9, hard=False).value == 1


LIMIT_FAULTS = [
    ({"value": -1}, "value", "value must be at least 1; got -1."),
    ({"value": 0}, "value", "value must be at least 1; got 0."),
    ({"value": 1.5}, "value", "value must be a whole number for tokens_per_minute; got 1.5."),
    ({"value": 10**13}, "value", "value must be at most 1000000000000"),
    ({"value": 10**30}, "value", "value must be at most"),
    ({"value": "100"}, "value", "value must be"),
    ({"value": None}, "value", "value must be"),
    ({"kind": "usd_per_day", "value": -0.01}, "value", "value must be greater than 0; got -0.01."),
    ({"kind": "usd_per_day", "value": 1e7}, "value", "value must be at most 9000000"),
    ({"kind": "usd_per_day", "value": 1e-10}, "value", "value must be at least a nano-dollar; got 1e-10."),
    ({"kind": "usd_per_year"}, "kind", "kind"),
    ({"kind": "usd_per_day", "burst": 5}, "burst", "burst is only for limits per minute. Remove it from usd_per_day."),
    ({"burst": 0}, "burst", "burst must be at least 1; got 0."),
    ({"hard": False}, "hard", "hard can be false for budgets only."),
    ({"model": ""}, "model", "model must not be empty."),
    ({"model": "m\0"}, "model", "printable"),
    ({"subject": "acme"}, "subject", "subject must be tenant:<id>, key:<id>, tenant:*, key:* or *; got 'acme'."),
    ({"subject": "tenant:"}, "subject", "subject must be"),
    ({"subject": "tenant:A"}, "subject", "subject must be"),
    ({"subject": "key:"}, "subject", "subject must be"),
    ({"subject": "key:\0"}, "subject", "subject must be"),
    ({"subject": "*; DROP TABLE limits"}, "subject", "subject must be"),
]


@pytest.mark.parametrize(("fields", "param", "message"), LIMIT_FAULTS)
def test_faults_of_limits(fields, param, message):
    with pytest.raises(InvalidRequest) as caught:
        limit(**fields)
    assert caught.value.param == param
    assert message in caught.value.message


def test_scopes_and_expiry_of_keys():
    request = decode_body(b'{"tenant": "acme", "scopes": ["admin", "inference", "admin"]}', CreateKey)
    assert rules.parse_scopes(request.scopes) == (Scope.INFERENCE, Scope.ADMIN)
    with pytest.raises(InvalidRequest, match="at least one"):
        rules.parse_scopes([])
    with pytest.raises(InvalidRequest) as caught:
        decode_body(b'{"tenant": "acme", "scopes": ["root"]}', CreateKey)
    assert caught.value.param == "scopes[0]"
    assert rules.parse_expiry(None, 10.0) is None
    assert rules.parse_expiry(10.5, 10.0) == 10.5
    with pytest.raises(InvalidRequest, match="must lie in the future"):
        rules.parse_expiry(10, 10.0)


@pytest.mark.parametrize("overlap", [-1, 90 * 86_400 + 1, 1e300])
def test_overlap_has_bounds(overlap):
    with pytest.raises(InvalidRequest) as caught:
        rules.parse_overlap(RotateKey(overlap_s=overlap))
    assert caught.value.param == "overlap_s"


def test_nan_is_no_number():
    for value in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(InvalidRequest, match="overlap_s must"):
            rules.parse_overlap(RotateKey(overlap_s=value))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b'{"overlap_s": NaN}', "not valid JSON"),
        (b'{"overlap_s": "\xff"}', ""),
        (b'{"overlap_s": 1e999}', ""),
        (b"[]", "The body must be an object; got a list."),
        (b"null", "The body must be an object; got null."),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 30_000 + b"1" + b"}" * 30_000, "nested too deeply"),
        (b'{"overlap_s": ' + b"9" * 5000 + b"}", ""),
        (b'{"\\u0000": 1}', "is not a field"),
    ],
)
def test_bytes_that_are_no_body(body, message):
    with pytest.raises(InvalidRequest) as caught:
        rules.parse_overlap(decode_body(body, RotateKey))
    assert message in caught.value.message


def test_an_empty_body_is_an_empty_object():
    assert decode_body(b"", RotateKey) == RotateKey()
    with pytest.raises(InvalidRequest, match="id is required"):
        decode_body(b"", CreateTenant)


def test_a_body_that_is_too_large():
    with pytest.raises(BodyTooLarge):
        decode_body(b" " * (MAX_BODY_BYTES + 1), RotateKey)


def test_queries():
    query = decode_query([("group_by", "tenant"), ("limit", "5"), ("tenant", "null")], UsageQuery)
    assert (query.group_by, query.limit, query.tenant, query.start) == ("tenant", 5, "null", "-30d")


@pytest.mark.parametrize(
    ("parameters", "param", "message"),
    [
        ([("limit", "many")], "limit", "limit must be an integer; got a string."),
        ([("limit", "5.5")], "limit", "limit must be an integer"),
        ([("limit", "")], "limit", "limit must be an integer"),
        ([("groupby", "x")], "groupby", "Did you mean group_by?"),
        ([("tenant", "a"), ("tenant", "b")], "tenant", "tenant comes twice in the query. Send it once."),
    ],
)
def test_faults_of_queries(parameters, param, message):
    with pytest.raises(InvalidRequest) as caught:
        decode_query(parameters, UsageQuery)
    assert caught.value.param == param
    assert message in caught.value.message


@pytest.mark.parametrize(("limit", "after"), [(0, ""), (501, ""), (-1, ""), (10**30, ""), (5, "x" * 600), (5, "\0")])
def test_pages_have_bounds(limit, after):
    with pytest.raises(InvalidRequest):
        rules.check_page(limit, after)
