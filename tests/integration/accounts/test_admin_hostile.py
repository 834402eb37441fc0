"""Malformed and hostile calls of the administration: each gets a clear refusal, and the store is as it was."""

import asyncio
import json
import socket
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from tests.support.admin_app import ADMIN_ID, ADMIN_KEY, administered

LONG = "a" * 1_000_000
INJECTION = "x'; DROP TABLE tenants; --"
LIMIT = {"subject": "tenant:acme", "kind": "tokens_per_minute", "value": 5}
KEY = "5b1f0c9e7d2a4c6f"
DEEP = "[" * 50_000 + "]" * 50_000

BODIES = [
    # (method, path, body, status, param)
    ("POST", "tenants", {"id": INJECTION}, 400, "id"),
    ("POST", "tenants", {"id": "b" * 200_000}, 400, "id"),
    ("POST", "tenants", {"id": LONG}, 413, None),
    ("POST", "tenants", {"id": "nul\0l"}, 400, "id"),
    ("POST", "tenants", {"id": "acme\n"}, 400, "id"),
    ("POST", "tenants", {"id": "аcme"}, 400, "id"),  # a Cyrillic a
    ("POST", "tenants", {"id": "../../etc/passwd"}, 400, "id"),
    ("POST", "tenants", {"id": "acme"}, 409, None),
    ("POST", "tenants", {"id": "gone"}, 409, None),
    ("POST", "tenants", {"id": ["acme"]}, 400, "id"),
    ("POST", "tenants", {"id": {"$ne": None}}, 400, "id"),
    ("POST", "tenants", {"id": None}, 400, "id"),
    ("POST", "tenants", {"id": "x", "parent": "nobody"}, 400, "parent"),
    ("POST", "tenants", {"id": "x", "parent": "team"}, 400, "parent"),
    ("POST", "tenants", {"id": "x", "parent": "x"}, 400, "parent"),
    ("POST", "tenants", {"id": "x", "name": "a\u202eb"}, 400, "name"),
    ("POST", "tenants", {"id": "x", "weight": -1}, 400, "weight"),
    ("POST", "tenants", {"id": "x", "weight": 1e-320}, 400, "weight"),
    ("POST", "tenants", {"id": "x", "models": ["m"] * 5000}, 400, "models"),
    ("POST", "tenants", {"id": "x", "scopes": ["admin"]}, 400, "scopes"),
    ("POST", "tenants", {"id": "x", "__class__": "Tenant"}, 400, "__class__"),
    ("PATCH", "tenants/acme", {"id": "other"}, 400, "id"),
    ("PATCH", "tenants/acme", {"parent": "team"}, 400, "parent"),
    ("PATCH", "tenants/acme", {"weight": None}, 400, "weight"),
    ("PATCH", "tenants/acme", {"disabled": 1}, 400, "disabled"),
    ("PATCH", "tenants/acme", {}, 400, None),
    ("PATCH", "tenants/nobody", {"name": "x"}, 404, None),
    ("DELETE", "tenants/acme", None, 409, None),
    ("POST", "keys", {"tenant": "nobody"}, 400, "tenant"),
    ("POST", "keys", {"tenant": "gone"}, 400, "tenant"),
    ("POST", "keys", {"tenant": INJECTION}, 400, "tenant"),
    ("POST", "keys", {"tenant": "acme", "id": KEY}, 409, None),
    ("POST", "keys", {"tenant": "acme", "id": "SHORT"}, 400, "id"),
    ("POST", "keys", {"tenant": "acme", "id": ""}, 400, "id"),
    ("POST", "keys", {"tenant": "acme", "scopes": ["root"]}, 400, "scopes[0]"),
    ("POST", "keys", {"tenant": "acme", "scopes": []}, 400, "scopes"),
    ("POST", "keys", {"tenant": "acme", "expires_at": "2001-01-01"}, 400, "expires_at"),
    ("POST", "keys", {"tenant": "acme", "expires_at": -5}, 400, "expires_at"),
    ("POST", "keys", {"tenant": "acme", "expires_at": 1e300}, 400, "expires_at"),
    ("POST", "keys", {"tenant": "acme", "secrets": [{"sha256": "00"}]}, 400, "secrets"),
    ("POST", "keys", {"tenant": "acme", "key": ADMIN_KEY}, 400, "key"),
    ("PATCH", f"keys/{KEY}", {"tenant": "operators"}, 400, "tenant"),
    ("PATCH", f"keys/{KEY}", {"revoked": False}, 400, "revoked"),
    ("PATCH", f"keys/{KEY}", {"scopes": "admin"}, 400, "scopes"),
    ("POST", f"keys/{KEY}/rotate", {"overlap_s": -1}, 400, "overlap_s"),
    ("POST", f"keys/{KEY}/rotate", {"overlap_s": 1e12}, 400, "overlap_s"),
    ("POST", f"keys/{KEY}/rotate", {"overlap_s": "1d"}, 400, "overlap_s"),
    ("POST", "keys/0000000000000000/rotate", None, 404, None),
    ("POST", "keys/0000000000000000/revoke", None, 404, None),
    ("POST", "limits", {**LIMIT, "value": -5}, 400, "value"),
    ("POST", "limits", {**LIMIT, "value": 0}, 400, "value"),
    ("POST", "limits", {**LIMIT, "value": 2**63}, 400, "value"),
    ("POST", "limits", {**LIMIT, "value": "5"}, 400, "value"),
    ("POST", "limits", {**LIMIT, "value": True}, 400, "value"),
    ("POST", "limits", {**LIMIT, "value": [5]}, 400, "value"),
    ("POST", "limits", {**LIMIT, "kind": "tokens_per_hour"}, 400, "kind"),
    ("POST", "limits", {**LIMIT, "subject": "tenant:nobody"}, 400, "subject"),
    ("POST", "limits", {**LIMIT, "subject": "key:0000000000000000"}, 400, "subject"),
    ("POST", "limits", {**LIMIT, "subject": "tenant:*' OR 1=1"}, 400, "subject"),
    ("POST", "limits", {**LIMIT, "subject": "**"}, 400, "subject"),
    ("POST", "limits", {**LIMIT, "id": "rate"}, 409, "id"),
    ("POST", "limits", {**LIMIT, "kind": "requests_per_minute"}, 409, None),
    ("POST", "limits", {**LIMIT, "bursts": 1}, 400, "bursts"),
    ("PUT", "limits/rate", {**LIMIT, "id": "other", "kind": "requests_per_minute"}, 400, "id"),
    ("PUT", "limits/rate", {**LIMIT, "kind": "usd_total"}, 409, None),
    ("PUT", "limits/rate", {"value": 9}, 400, "subject"),
    ("PUT", "limits/NOT%20AN%20ID", LIMIT, 400, "id"),
    ("DELETE", "limits/nothing", None, 404, None),
    ("DELETE", "tenants/%00", None, 404, "id"),
    ("DELETE", f"keys/{KEY}%00", None, 404, "id"),
    ("DELETE", "keys/..%2f..%2fetc", None, 404, "id"),
    ("POST", "keys/%27%20OR%201=1/rotate", {}, 404, "id"),
    ("PUT", "tenants/acme", {"id": "acme"}, 405, None),
    ("DELETE", "tenants", None, 405, None),
    ("POST", "tenants/acme/keys", {}, 405, None),
]
RAW = [
    ("POST", "tenants", b""),
    ("POST", "tenants", b"{"),
    ("POST", "tenants", b"\xff\xfe{}"),
    ("POST", "tenants", b'{"id": "x", "name": "\\ud800"}'),
    ("POST", "tenants", b'{"id": "x", "weight": NaN}'),
    ("POST", "tenants", b'{"id": "x", "weight": -Infinity}'),
    ("POST", "tenants", b'{"id": "x", "weight": 1e999}'),
    ("POST", "tenants", b'{"id": "x", "weight": ' + b"9" * 10_000 + b"}"),
    ("POST", "tenants", b'{"id": "x", "name": ' + DEEP.encode() + b"}"),
    ("POST", "tenants", b'[{"id": "x"}]'),
    ("POST", "tenants", b'"x"'),
    ("POST", "tenants", b'{"id": "x"} {"id": "y"}'),
    ("POST", "limits", json.dumps({**LIMIT, "kind": "usd_total", "value": 0}).replace("0}", "1e400}").encode()),
    ("POST", f"keys/{KEY}/rotate", DEEP.encode()),
]
QUERIES = [
    ("tenants", "limit=0", "limit"),
    ("tenants", "limit=501", "limit"),
    ("tenants", "limit=-1", "limit"),
    ("tenants", "limit=1e3", "limit"),
    ("tenants", "limit=99999999999999999999999", "limit"),
    ("tenants", "after=%00", "after"),
    ("tenants", "after='%20OR%201=1", "after"),
    ("tenants", "parent=%27--", "parent"),
    ("tenants", "limit=5&limit=6", "limit"),
    ("tenants", "limits=5", "limits"),
    ("tenants", "a=%ff", None),
    ("tenants", "&".join(f"a{number}=1" for number in range(60)), None),
    ("keys", "tenant=A", "tenant"),
    ("limits", "subject=acme", "subject"),
    ("budgets", "subject=key:", "subject"),
    ("budgets", "after=nonsense", "after"),
    ("usage", "group_by=tenant,tenant", "group_by"),
    ("usage", "group_by=password", "group_by"),
    ("usage", "group_by=model;DROP%20TABLE%20usage", "group_by"),
    ("usage", "start=yesterday", "start"),
    ("usage", "start=-7y", "start"),
    ("usage", "start=now&end=-7d", "start"),
    ("usage", "start=1e400", "start"),
    ("usage", "end=99999999999999", "end"),
    ("usage", "format=xml", "format"),
    ("usage", "after=nonsense", "after"),
    ("usage", "model=%00", "model"),
    ("usage/events", "after=WzEsMl0", "after"),
    ("usage/events", "group_by=model", "group_by"),
]


@pytest.fixture
async def admin(tmp_path):
    async with administered(tmp_path) as system:
        await system.done("POST", "tenants", {"id": "acme"})
        await system.done("POST", "tenants", {"id": "team", "parent": "acme"})
        await system.done("POST", "tenants", {"id": "gone"})
        await system.done("DELETE", "tenants/gone")
        await system.done("POST", "keys", {"tenant": "acme", "id": KEY})
        await system.done("PUT", "limits/rate", {**LIMIT, "kind": "requests_per_minute"})
        yield system


def error_of(response, status):
    """The error, which must be a sentence of moderate length."""
    assert response.status_code == status, response.text[:500]
    error = response.json()["error"]
    assert error["message"].endswith((".", "?")), error
    assert len(error["message"]) < 500, error
    return error


async def test_bodies_and_paths(admin):
    before = await admin.contents()
    for method, path, body, status, param in BODIES:
        response = await admin.call(method, path, body)
        assert error_of(response, status)["param"] == param, (method, path, response.text)
        assert await admin.contents() == before, (method, path, str(body)[:100])
    assert len(BODIES) > 60


async def test_bytes_that_are_no_body(admin):
    before = await admin.contents()
    for method, path, raw in RAW:
        response = await admin.client.request(method, f"/admin/v1/{path}", content=raw)
        assert error_of(response, 400), raw[:50]
        assert await admin.contents() == before, raw[:50]


async def test_queries(admin):
    for path, query, param in QUERIES:
        response = await admin.client.get(f"/admin/v1/{path}?{query}")
        assert error_of(response, 400)["param"] == param, (path, query, response.text)


async def test_ids_beyond_all_bounds_in_the_path(admin):
    before = await admin.contents()
    response = await admin.client.get(f"/admin/v1/tenants/{'a' * 30_000}")
    assert error_of(response, 404)["param"] == "id"
    # A line of a megabyte does not even reach the routes.
    head = f"Host: localhost\r\nAuthorization: Bearer {ADMIN_KEY}\r\n\r\n"
    answer = await asyncio.to_thread(sent, admin.url, f"DELETE /admin/v1/tenants/{LONG} HTTP/1.1\r\n{head}".encode())
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert await admin.contents() == before


def sent(url, request):
    """What bytes are answered with, up to the end of the connection."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=300) as connection, suppress(OSError):
        connection.sendall(request)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        return connection.recv(65_536)


@pytest.mark.parametrize("key", ["", "é", "x" * 256, "a\tb"])
async def test_idempotency_keys_that_are_none(admin, key):
    before = await admin.contents()
    headers = {"idempotency-key": key.encode("latin-1")}
    response = await admin.client.post("/admin/v1/tenants", json={"id": "new"}, headers=headers)
    assert error_of(response, 400)["param"] == "Idempotency-Key"
    assert await admin.contents() == before


async def test_racing_for_one_id_makes_one(admin):
    for path, body in (
        ("tenants", {"id": "raced"}),
        ("keys", {"tenant": "acme", "id": "raced00000000000"}),
        ("limits", {"subject": "tenant:acme", "kind": "usd_total", "value": 1}),
        ("limits", {"subject": "tenant:acme", "kind": "usd_per_day", "value": 1, "id": "raced"}),
    ):
        answers = await asyncio.gather(*(admin.call("POST", path, body) for _ in range(6)))
        assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409, 409, 409], path


async def test_rotating_and_revoking_at_once_ends_revoked(admin):
    made = await admin.done("POST", "keys", {"tenant": "acme", "id": "raced00000000000"})
    calls = [("rotate", {"overlap_s": 3600}), ("revoke", None)] * 5
    answers = await asyncio.gather(*(admin.call("POST", f"keys/raced00000000000/{verb}", body) for verb, body in calls))
    assert {answer.status_code for answer in answers} <= {200, 409}
    assert all(answer.status_code == 200 for answer, (verb, _) in zip(answers, calls, strict=True) if verb == "revoke")
    secrets = [made["key"], *(answer.json().get("key") for answer in answers)]
    assert [key for key in secrets if key and await admin.caller(key)] == []


async def test_a_race_of_a_tenant_and_its_key_names_what_prevents_the_change(admin):
    await admin.done("POST", "tenants", {"id": "fresh"})
    deleted, made = await asyncio.gather(
        admin.call("DELETE", "tenants/fresh"), admin.call("POST", "keys", {"tenant": "fresh"})
    )
    assert (deleted.status_code, made.status_code) in {(200, 400), (409, 200)}
    keys = await admin.call("GET", "keys", query={"tenant": "fresh"})
    assert keys.status_code == (404 if deleted.status_code == 200 else 200)


async def test_an_admin_key_can_end_itself_and_is_refused_at_once(admin):
    """But the last one cannot: nobody could administer any more."""
    assert "scope `admin`" in (await admin.refused("POST", f"keys/{ADMIN_ID}/revoke", 409))["message"]
    await admin.done("POST", "keys", {"tenant": "operators", "scopes": ["admin"]})
    await admin.done("POST", f"keys/{ADMIN_ID}/revoke")
    await admin.refused("GET", "tenants", 401)
