"""What tenants, keys and limits must look like."""

import math
from typing import Any

import pytest

from maitred.core.errors import InvalidRequest
from maitred.core.limits import Limit, LimitKind
from maitred.core.tenancy import ApiKey, KeySecret, Scope, Tenant
from maitred.store.rules import (
    apply_changes,
    check_key,
    check_limit,
    check_overlap,
    check_page,
    check_subject,
    check_tenant,
    is_id,
)

NOW_S = 1_000_000.0
SECRET = KeySecret(bytes(32))


@pytest.mark.parametrize("text", ["a", "0", "acme", "a-b_c", "9-", "a" * 63])
def test_ids(text: str) -> None:
    assert is_id(text)


@pytest.mark.parametrize(
    "text",
    ["", "-a", "_a", "A", "a b", "a\n", "a\0", "é", "a" * 64, "a.b", "a:b", "'; DROP TABLE tenants; --", 5, None],
)
def test_what_is_no_id(text: object) -> None:
    assert not is_id(text)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"id": "Acme"}, "id"),
        ({"id": "a" * 100_000}, "id"),
        ({"parent": "a b"}, "parent"),
        ({"parent": "acme"}, "parent"),
        ({"name": "x" * 257}, "name"),
        ({"name": "a\0b"}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "\ud800"}, "name"),
        ({"name": "a\u202eb"}, "name"),
        ({"name": 5}, "name"),
        ({"weight": 0.0}, "weight"),
        ({"weight": -1.0}, "weight"),
        ({"weight": 1000.1}, "weight"),
        ({"weight": math.nan}, "weight"),
        ({"weight": math.inf}, "weight"),
        ({"weight": "1"}, "weight"),
        ({"priority_ceiling": 0}, "priority_ceiling"),
        ({"priority_ceiling": 11}, "priority_ceiling"),
        ({"priority_ceiling": True}, "priority_ceiling"),
        ({"models": ("a", "")}, "models[1]"),
        ({"models": ("m" * 257,)}, "models[0]"),
        ({"regions": ("eu", "a\tb")}, "regions[1]"),
        ({"tags": ("t",) * 1001}, "tags"),
        ({"disabled": "yes"}, "disabled"),
        ({"tags": object()}, None),
    ],
)
def test_tenants_that_cannot_be(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_tenant(Tenant(**({"id": "acme"} | fields)))
    assert caught.value.param == param
    assert caught.value.message.endswith(".")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"name": "Größe 🦙 '; DROP TABLE tenants; --"},
        {"weight": 1000},
        {"weight": 1e-9},
        {"models": ()},
        {"models": ("llama-3.1-8b", "m" * 256)},
        {"priority_ceiling": 10, "regions": ("eu",), "tags": ("local-only",), "disabled": True, "parent": "a"},
    ],
)
def test_tenants_that_can_be(fields: dict[str, Any]) -> None:
    check_tenant(Tenant(**({"id": "acme"} | fields)))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"id": ""}, "id"),
        ({"tenant": "tenant:acme"}, "tenant"),
        ({"name": "\x1b[31m"}, "name"),
        ({"scopes": ()}, "scopes"),
        ({"scopes": (Scope.ADMIN, Scope.ADMIN)}, "scopes"),
        ({"scopes": ("root",)}, "scopes[0]"),
        ({"expires_s": NOW_S}, "expires_s"),
        ({"expires_s": math.inf}, "expires_s"),
        ({"secrets": ()}, "secrets"),
        ({"secrets": (KeySecret(b"short"),)}, "secrets"),
        ({"secrets": (SECRET, SECRET)}, "secrets"),
        ({"secrets": (KeySecret(bytes(32), NOW_S - 1),)}, "secrets"),
    ],
)
def test_keys_that_cannot_be(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_key(ApiKey(**({"id": "k1", "tenant": "acme", "secrets": (SECRET,)} | fields)), NOW_S)
    assert caught.value.param == param


def test_a_key_that_can_be() -> None:
    check_key(
        ApiKey(id="k1", tenant="acme", scopes=tuple(Scope), secrets=(SECRET,), expires_s=NOW_S + 1, name="CI"), NOW_S
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"id": "L1"}, "id"),
        ({"subject": ""}, "subject"),
        ({"kind": "requests_per_hour"}, "kind"),
        ({"value": 0}, "value"),
        ({"value": -5}, "value"),
        ({"value": 2**53}, "value"),
        ({"value": 2**70}, "value"),
        ({"value": 1.5}, "value"),
        ({"value": True}, "value"),
        ({"model": ""}, "model"),
        ({"model": "m" * 257}, "model"),
        ({"model": "a\0"}, "model"),
        ({"burst": 0}, "burst"),
        ({"burst": 2**53}, "burst"),
        ({"kind": LimitKind.CONCURRENT_REQUESTS, "burst": 5}, "burst"),
        ({"kind": LimitKind.USD_TOTAL, "burst": 5}, "burst"),
        ({"hard": False}, "hard"),
    ],
)
def test_limits_that_cannot_be(fields: dict[str, Any], param: str) -> None:
    sound = {"id": "l1", "subject": "*", "kind": LimitKind.TOKENS_PER_MINUTE, "value": 1}
    with pytest.raises(InvalidRequest) as caught:
        check_limit(Limit(**(sound | fields)))
    assert caught.value.param == param


@pytest.mark.parametrize("kind", LimitKind)
def test_the_largest_limit_of_each_kind(kind: LimitKind) -> None:
    check_limit(
        Limit(
            id="l1",
            subject="tenant:acme",
            kind=kind,
            value=2**53 - 1,
            model="m" * 256,
            burst=2**53 - 1 if kind.per_minute else None,
            hard=not kind.spend,
        )
    )


@pytest.mark.parametrize("subject", ["*", "tenant:*", "key:*", "tenant:acme", "key:5b1f0c9e7d2a"])
def test_subjects(subject: str) -> None:
    check_subject(subject)


@pytest.mark.parametrize(
    "subject", ["", "acme", "tenant", "tenant:", "key:", "team:acme", "tenant:a:b", "*:*", "tenant:ACME", "key:a\0"]
)
def test_what_is_no_subject(subject: str) -> None:
    with pytest.raises(InvalidRequest):
        check_subject(subject)


@pytest.mark.parametrize(("after", "limit"), [("", 0), ("", 1001), ("", -1), ("a\0", 10), ("' OR 1=1", 10)])
def test_pages_that_cannot_be(after: str, limit: int) -> None:
    with pytest.raises(InvalidRequest):
        check_page(after, limit)


@pytest.mark.parametrize("overlap_s", [-1, math.nan, math.inf, 1e9])
def test_overlaps_that_cannot_be(overlap_s: float) -> None:
    with pytest.raises(InvalidRequest):
        check_overlap(overlap_s)


def test_changes_are_converted_and_the_rest_stays() -> None:
    tenant = Tenant(id="acme", name="Acme", tags=("a",))
    after = apply_changes(tenant, {"weight": 2, "models": ["m"], "tags": []}, frozenset({"weight", "models", "tags"}))
    assert after == Tenant(id="acme", name="Acme", weight=2.0, models=("m",), tags=())
    key = ApiKey(id="k", tenant="acme", secrets=(KeySecret(bytes(range(32)), 5.0),))
    assert apply_changes(key, {"scopes": (Scope.ADMIN,)}, frozenset({"scopes"})).secrets == key.secrets


@pytest.mark.parametrize(
    ("changes", "param"), [({"id": "other"}, "id"), ({"nonsense": 1}, "nonsense"), ({"weight": "heavy"}, "weight")]
)
def test_changes_that_cannot_be(changes: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        apply_changes(Tenant(id="acme"), changes, frozenset({"weight"}))
    assert caught.value.param == param
