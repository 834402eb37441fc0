"""Whatever is sent to the administration is refused with a sentence, or is something that the store takes."""

import contextlib
import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.errors import InvalidRequest
from maitred.core.limits import LimitKind
from maitred.core.tenancy import ApiKey, KeySecret
from maitred.store.rules import check_key, check_limit, check_overlap, check_tenant
from maitred.wire.admin import requests, rules
from maitred.wire.admin.decode import decode_body, decode_query
from maitred.wire.admin.responses import LimitBody, TenantBody, encode

NOW_S = 1_000.0
numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, 0.001, 1, 10, 1000, 1e-9, 1e-10, 9e6, 10**12, 2**53])
)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text()),
    lambda below: st.one_of(st.lists(below, max_size=4), st.dictionaries(st.text(), below, max_size=4)),
    max_leaves=8,
)


def mostly(kind, wrong):
    """Nine times out of ten of this kind."""
    return st.integers(0, 9).flatmap(lambda drawn: wrong if drawn == 0 else kind)


def bodies(needed, **optional):
    """Bodies whose fields are mostly right, and sometimes of a wrong type or missing."""
    fields = {name: mostly(kind, anything) for name, kind in (needed | optional).items()}
    complete = st.fixed_dictionaries(
        {name: fields[name] for name in needed}, optional={name: fields[name] for name in optional}
    )
    return mostly(complete, st.fixed_dictionaries({}, optional=fields))


good_ids = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,62}", fullmatch=True)
ids = mostly(good_ids, st.text(max_size=70))
lines = mostly(st.text("ab /-é漢🚀", max_size=20), st.text())
words = st.lists(mostly(st.from_regex(r"[a-z0-9][a-z.:-]{0,9}", fullmatch=True), st.text(max_size=70)), max_size=4)
counts = mostly(st.one_of(st.integers(1, 10**12), st.floats(1e-9, 9e6)), numbers)
subjects = st.one_of(st.sampled_from(["*", "tenant:*", "key:*"]), ids.map("tenant:{}".format), ids.map("key:{}".format))

tenants = bodies(
    {"id": ids},
    parent=st.one_of(st.none(), ids),
    name=lines,
    weight=mostly(st.floats(0.001, 1000), numbers),
    models=st.one_of(st.none(), words),
    priority_ceiling=st.one_of(st.none(), mostly(st.integers(1, 10), numbers)),
    regions=words,
    tags=words,
    disabled=st.booleans(),
)
keys = bodies(
    {"tenant": ids},
    id=mostly(st.from_regex(r"[a-z0-9]{16}", fullmatch=True), ids),
    name=lines,
    scopes=st.lists(st.sampled_from(["inference", "metrics", "admin"]), min_size=1, max_size=4),
    expires_at=mostly(st.one_of(st.floats(2000, 1e9), st.datetimes().map(str)), numbers),
    cache_controls=st.none() | st.lists(st.sampled_from(["no-cache", "ttl", "only-if-cached"]), max_size=4),
)
limits = bodies(
    {"subject": subjects, "kind": st.sampled_from([*LimitKind]), "value": counts},
    model=st.one_of(st.none(), lines),
    burst=st.one_of(st.none(), st.none(), counts),
    hard=mostly(st.just(True), st.booleans()),
)


def body_of(fields):
    # Python writes NaN and Infinity, too, which are no JSON.
    return json.dumps(fields).encode()


@given(tenants)
def test_tenants(fields):
    try:
        tenant = rules.to_tenant(decode_body(body_of(fields), requests.CreateTenant))
    except InvalidRequest as error:
        assert error.message.endswith((".", "?"))  # noqa: PT017
        return
    check_tenant(tenant)
    shown = msgspec.json.decode(encode(TenantBody.of(tenant)))
    del shown["object"]
    assert rules.to_tenant(decode_body(body_of(shown), requests.CreateTenant)) == tenant


@given(keys)
def test_keys(fields):
    try:
        request = decode_body(body_of(fields), requests.CreateKey)
        rules.check_id("tenant", request.tenant)
        rules.check_name(request.name)
        if request.id is not None:
            rules.check_key_id("id", request.id)
        scopes, expires_s = rules.parse_scopes(request.scopes), rules.parse_expiry(request.expires_at, NOW_S)
    except InvalidRequest:
        return
    key_id = request.id or "0" * 16
    secrets = (KeySecret(b"x" * 32),)
    controls = rules.parse_cache_controls(request.cache_controls)
    assert (controls is None) == (request.cache_controls is None)
    assert set(controls or ()) == set(request.cache_controls or ())
    key = ApiKey(
        id=key_id,
        tenant=request.tenant,
        name=request.name,
        scopes=scopes,
        secrets=secrets,
        expires_s=expires_s,
        cache_controls=controls,
    )
    check_key(key, NOW_S)


@given(limits)
def test_limits(fields):
    try:
        limit = rules.to_limit(decode_body(body_of(fields), requests.CreateLimit), "lim-1")
    except InvalidRequest as error:
        assert error.message.endswith((".", "?"))  # noqa: PT017
        return
    check_limit(limit)
    shown = msgspec.json.decode(encode(LimitBody.of(limit)))
    del shown["object"]
    # Dollars are doubles, and come back as the same number of nano-dollars.
    assert rules.to_limit(decode_body(body_of(shown), requests.CreateLimit), "lim-1") == limit


@given(numbers)
def test_overlaps(overlap_s):
    try:
        overlap_s = rules.parse_overlap(decode_body(body_of({"overlap_s": overlap_s}), requests.RotateKey))
    except InvalidRequest:
        return
    check_overlap(overlap_s)


@given(st.binary(), st.sampled_from([requests.CreateTenant, requests.UpdateKey, requests.CreateLimit]))
def test_any_bytes(body, kind):
    with contextlib.suppress(InvalidRequest):
        assert isinstance(decode_body(body, kind), kind)


@given(anything, st.sampled_from([requests.CreateTenant, requests.UpdateKey, requests.CreateLimit]))
def test_any_json(value, kind):
    with contextlib.suppress(InvalidRequest):
        assert isinstance(decode_body(body_of(value), kind), kind)


@given(st.lists(st.tuples(st.one_of(st.text(), st.sampled_from(["limit", "after", "start"])), st.text())))
def test_any_query(parameters):
    with contextlib.suppress(InvalidRequest):
        assert isinstance(decode_query(parameters, requests.UsageQuery), requests.UsageQuery)
