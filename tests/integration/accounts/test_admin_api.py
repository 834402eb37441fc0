"""The administration over real HTTP, on a real SQLite file: what it does, and that it does it once."""

import asyncio
import csv
import io
from contextlib import ExitStack

import pytest

from maitred.core.context import Outcome
from maitred.core.tenancy import Scope, Tenant
from maitred.core.usage import UsageEvent
from maitred.identity.keys import parse
from tests.support.admin_app import ADMIN_KEY, administered


@pytest.fixture
async def admin(tmp_path):
    async with administered(tmp_path) as system:
        yield system


async def test_a_tenant_from_its_creation_to_its_end(admin):
    created = await admin.done("POST", "tenants", {"id": "acme", "name": "Acme Inc."})
    assert created == {
        "id": "acme",
        "object": "tenant",
        "parent": None,
        "name": "Acme Inc.",
        "weight": 1.0,
        "models": None,
        "priority_ceiling": None,
        "regions": [],
        "tags": [],
        "disabled": False,
    }
    team = await admin.done("POST", "tenants", {"id": "research", "parent": "acme", "models": ["m"], "weight": 2})
    assert await admin.done("GET", "tenants/research") == team
    changed = await admin.done("PATCH", "tenants/research", {"models": None, "tags": ["local-only"], "name": "Ünï 🚀"})
    assert (changed["models"], changed["tags"], changed["name"], changed["weight"]) == (
        *(None, ["local-only"], "Ünï 🚀"),
        2.0,
    )
    # Applied at once on the gateway that served it.
    assert admin.directory.tenant("research").tags == ("local-only",)
    assert (await admin.refused("DELETE", "tenants/acme", 409))["message"] == (
        "The tenant acme has teams: research. Delete them first."
    )
    assert await admin.done("DELETE", "tenants/research") == {"id": "research", "object": "tenant", "deleted": True}
    assert admin.directory.tenant("research") is None
    for _ in range(2):
        await admin.refused("DELETE", "tenants/research", 404)
        await admin.refused("GET", "tenants/research", 404)
    assert "not used again" in (await admin.refused("POST", "tenants", 409, {"id": "research"}))["message"]


async def test_lists_come_in_pages_that_do_not_move(admin):
    for number in range(7):
        await admin.done("POST", "tenants", {"id": f"t{number}"})
    seen, after = [], ""
    while True:
        page = await admin.done("GET", "tenants", query={"limit": 3, "after": after})
        assert page["object"] == "list"
        seen += [tenant["id"] for tenant in page["data"]]
        if not page["has_more"]:
            assert page["next"] is None
            break
        assert page["next"] == page["data"][-1]["id"]
        after = page["next"]
        await admin.done("POST", "tenants", {"id": f"a-{after}"})  # sorts before the pages to come
    assert seen == ["operators", *(f"t{number}" for number in range(7))]
    teams = await admin.done("GET", "tenants", query={"parent": "t0"})
    assert teams["data"] == []


async def test_a_key_is_shown_once_and_works_until_it_is_revoked(admin):
    await admin.done("POST", "tenants", {"id": "acme"})
    made = await admin.done("POST", "keys", {"tenant": "acme", "name": "ci", "scopes": ["inference", "metrics"]})
    public_id, secret = parse(made["key"])
    assert public_id == made["id"]
    assert made["secrets"] == [{"expires_at": None}]
    shown = await admin.done("GET", f"keys/{public_id}")
    assert shown == {name: value for name, value in made.items() if name != "key"}
    listed = (await admin.done("GET", "keys", query={"tenant": "acme"}))["data"]
    assert listed == [shown]
    assert secret not in admin.stored_text()
    assert (await admin.caller(made["key"])).scopes == {Scope.INFERENCE, Scope.METRICS}

    changed = await admin.done("PATCH", f"keys/{public_id}", {"scopes": ["metrics"], "expires_at": "2100-01-01"})
    assert (changed["scopes"], changed["expires_at"]) == (["metrics"], "2100-01-01T00:00:00Z")
    assert (await admin.caller(made["key"])).scopes == {Scope.METRICS}

    for verb, path in (("POST", f"keys/{public_id}/revoke"), ("DELETE", f"keys/{public_id}")):
        assert (await admin.done(verb, path))["revoked"]
        assert await admin.caller(made["key"]) is None
    assert "revoked" in (await admin.refused("POST", f"keys/{public_id}/rotate", 409))["message"]


async def test_rotation_overlaps(admin):
    await admin.done("POST", "tenants", {"id": "acme"})
    first = await admin.done("POST", "keys", {"tenant": "acme"})
    second = await admin.done("POST", f"keys/{first['id']}/rotate", {"overlap_s": 3600})
    assert len(second["secrets"]) == 2
    assert first["key"] != second["key"]
    assert await admin.caller(first["key"])
    assert await admin.caller(second["key"])
    third = await admin.done("POST", f"keys/{first['id']}/rotate", {"overlap_s": 0})
    assert third["secrets"] == [{"expires_at": None}]
    assert await admin.caller(first["key"]) is None
    assert await admin.caller(second["key"]) is None
    assert await admin.caller(third["key"])
    without_body = await admin.done("POST", f"keys/{first['id']}/rotate")
    assert len(without_body["secrets"]) == 2


async def test_rotations_that_race_all_happen_and_the_last_secret_stays(admin):
    await admin.done("POST", "tenants", {"id": "acme"})
    key = await admin.done("POST", "keys", {"tenant": "acme"})
    rotated = await asyncio.gather(
        *(admin.done("POST", f"keys/{key['id']}/rotate", {"overlap_s": 0}) for _ in range(8)),
    )
    assert len({answer["key"] for answer in rotated}) == 8
    alive = [answer["key"] for answer in rotated if await admin.caller(answer["key"])]
    assert len(alive) == 1
    assert (await admin.done("GET", f"keys/{key['id']}"))["secrets"] == [{"expires_at": None}]


async def test_limits_in_their_own_units(admin):
    await admin.done("POST", "tenants", {"id": "acme"})
    rate = await admin.done(
        "POST",
        "limits",
        {"subject": "tenant:acme", "kind": "tokens_per_minute", "value": 1000, "model": "m", "burst": 50},
    )
    assert rate["id"].startswith("lim-")
    assert (rate["value"], rate["model"], rate["burst"], rate["hard"]) == (1000, "m", 50, True)
    assert [limit.value for limit in admin.directory.limits_of("tenant:acme")] == [1000]
    budget = {"subject": "tenant:acme", "kind": "usd_per_month", "value": 12.5, "hard": False}
    for value in (12.5, 0.1, 0.1):
        put = await admin.done("PUT", "limits/monthly", {**budget, "value": value})
        assert (put["id"], put["value"]) == ("monthly", value)
    assert admin.directory.limits_of("tenant:acme")[1].value == 100_000_000
    listed = (await admin.done("GET", "limits", query={"subject": "tenant:acme"}))["data"]
    assert {limit["id"] for limit in listed} == {rate["id"], "monthly"}
    assert await admin.done("GET", "limits/monthly") == put
    assert "already sets" in (await admin.refused("POST", "limits", 409, budget))["message"]
    await admin.refused("POST", "limits", 409, {**budget, "id": "monthly"})
    # A soft budget and a hard one go together.
    await admin.done("PUT", "limits/hard", {**budget, "hard": True})
    await admin.done("DELETE", "limits/monthly")
    await admin.refused("DELETE", "limits/monthly", 404)
    assert {limit.id for limit in admin.directory.limits_of("tenant:acme")} == {rate["id"], "hard"}


async def test_budgets_say_what_is_left(admin):
    for tenant in ("acme", "other"):
        await admin.done("POST", "tenants", {"id": tenant})
    await admin.done("PUT", "limits/all", {"subject": "*", "kind": "usd_total", "value": 100})
    await admin.done("PUT", "limits/each", {"subject": "tenant:*", "kind": "usd_per_day", "value": 2})
    await admin.done("PUT", "limits/acme", {"subject": "tenant:acme", "kind": "usd_per_month", "value": 5.5})
    seen, after = [], ""
    while True:
        page = await admin.done("GET", "budgets", query={"limit": 1, "after": after})
        seen += page["data"]
        if not page["has_more"]:
            break
        after = page["next"]
    assert [(budget["subject"], budget["id"]) for budget in seen] == [
        ("*", "all"),
        ("tenant:acme", "acme"),
        ("tenant:acme", "each"),
        ("tenant:operators", "each"),
        ("tenant:other", "each"),
    ]
    assert seen[1] == {
        "id": "acme",
        "object": "budget",
        "subject": "tenant:acme",
        "kind": "usd_per_month",
        "model": None,
        "hard": True,
        "limit_usd": 5.5,
        "charged_usd": 0.0,
        "reserved_usd": 0.0,
        "remaining_usd": 5.5,
        "resets_at": seen[1]["resets_at"],
    }
    assert seen[1]["resets_at"].endswith("-01T00:00:00Z")
    assert seen[0]["resets_at"] is None
    assert (await admin.done("GET", "budgets", query={"subject": "tenant:acme"}))["data"] == seen[1:3]


def event(number, **fields):
    known = {
        "id": f"u{number}",
        "request_id": f"req-{number}",
        "time_s": 1_790_000_000.0 + number,
        "key": "5b1f0c9e7d2a4c6f",
        "tenant": "acme",
        "organisation": "acme",
        "model": "m",
        "prompt_tokens": 10,
        "output_tokens": 5,
        "cost_nusd": 1_500_000,
        "outcome": Outcome.FINISHED,
    }
    return UsageEvent(**{**known, **fields})


async def test_usage_in_sums_and_lines(admin):
    await admin.record([*(event(number) for number in range(5)), event(5, tenant="research", model="=cmd()")])
    span = {"start": "2026-01-01", "end": "1800000000"}
    total = await admin.done("GET", "usage", query=span)
    assert total["data"] == [
        {"requests": 6, "prompt_tokens": 60, "cached_tokens": 0, "output_tokens": 30, "cost_usd": 0.009}
    ]
    assert (total["start"], total["group_by"]) == ("2026-01-01T00:00:00Z", [])
    grouped = await admin.done("GET", "usage", query={**span, "group_by": "tenant,model", "limit": 1})
    assert [(row["tenant"], row["model"], row["requests"]) for row in grouped["data"]] == [("acme", "m", 5)]
    rest = await admin.done("GET", "usage", query={**span, "group_by": "tenant,model", "after": grouped["next"]})
    assert [row["tenant"] for row in rest["data"]] == ["research"]
    assert not rest["has_more"]
    only = await admin.done("GET", "usage", query={**span, "tenant": "research"})
    assert only["data"][0]["requests"] == 1
    lines = await admin.done("GET", "usage/events", query={**span, "limit": 4})
    assert [line["id"] for line in lines["data"]] == ["u5", "u4", "u3", "u2"]
    assert lines["data"][0]["time"] == "2026-09-21T14:13:25Z"
    assert lines["data"][0]["cost_usd"] == 0.0015
    more = await admin.done("GET", "usage/events", query={**span, "after": lines["next"]})
    assert [line["id"] for line in more["data"]] == ["u1", "u0"]


async def test_a_key_says_which_cache_controls_its_requests_may_use(admin):
    await admin.done("POST", "tenants", {"id": "acme"})
    plain = await admin.done("POST", "keys", {"tenant": "acme"})
    assert plain["cache_controls"] is None
    assert (await admin.caller(plain["key"])).cache_controls is None
    made = await admin.done("POST", "keys", {"tenant": "acme", "cache_controls": ["ttl", "no-cache", "ttl"]})
    assert made["cache_controls"] == ["no-cache", "ttl"]
    assert (await admin.caller(made["key"])).cache_controls == ("no-cache", "ttl")
    for controls in ([], ["only-if-cached"], None):
        changed = await admin.done("PATCH", f"keys/{made['id']}", {"cache_controls": controls})
        assert changed["cache_controls"] == controls
        assert (await admin.done("GET", f"keys/{made['id']}"))["cache_controls"] == controls
        assert (await admin.caller(made["key"])).cache_controls == (None if controls is None else tuple(controls))
    await admin.done("PATCH", f"keys/{made['id']}", {"name": "ci", "cache_controls": []})
    assert (await admin.done("PATCH", f"keys/{made['id']}", {"name": "cd"}))["cache_controls"] == []
    error = await admin.refused("PATCH", f"keys/{made['id']}", 400, {"cache_controls": ["max-age"]})
    assert "must be one of no-cache" in error["message"]


async def test_usage_of_answers_from_a_cache(admin):
    hit = {"prompt_tokens": 0, "output_tokens": 0, "cache": "exact", "saved_tokens": 15}
    await admin.record([event(0), event(1, **hit), event(2, **(hit | {"cache": "coalesced"}))])
    span = {"start": "2026-01-01", "end": "1800000000"}
    grouped = await admin.done("GET", "usage", query={**span, "group_by": "cache"})
    assert [(row["cache"], row.get("cache_hits", 0), row.get("saved_tokens", 0)) for row in grouped["data"]] == [
        ("", 0, 0),
        ("coalesced", 1, 15),
        ("exact", 1, 15),
    ]
    only = await admin.done("GET", "usage", query={**span, "cache": "exact"})
    assert (only["data"][0]["requests"], only["data"][0]["prompt_tokens"]) == (1, 0)
    lines = await admin.done("GET", "usage/events", query={**span, "cache": "coalesced"})
    assert [(line["id"], line["cache"], line["saved_tokens"]) for line in lines["data"]] == [("u2", "coalesced", 15)]
    response = await admin.client.get("/admin/v1/usage", params={"format": "csv", "start": "0"})
    (row,) = csv.DictReader(io.StringIO(response.text))
    assert (row["requests"], row["cache_hits"], row["saved_tokens"]) == ("3", "2", "30")


async def test_usage_as_csv(admin):
    await admin.record([event(0), event(1, model="=cmd()")])
    response = await admin.client.get("/admin/v1/usage", params={"format": "csv", "group_by": "model", "start": "0"})
    assert response.headers["content-type"] == "text/csv; charset=utf-8"
    rows = list(csv.DictReader(io.StringIO(response.text)))
    assert [(row["model"], row["requests"], row["cost_usd"]) for row in rows] == [
        ("'=cmd()", "1", "0.001500000"),
        ("m", "1", "0.001500000"),
    ]


async def test_a_repeated_request_is_done_once(admin):
    headers = {"idempotency-key": "k1"}
    first = await admin.done("POST", "tenants", {"id": "acme"}, headers=headers)
    again = await admin.call("POST", "tenants", {"id": "acme"}, headers=headers)
    assert (again.status_code, again.json(), again.headers["x-maitred-idempotent-replay"]) == (200, first, "true")
    other = await admin.refused("POST", "tenants", 409, {"id": "other"}, headers=headers)
    assert "another call" in other["message"]
    await admin.refused("GET", "tenants/other", 404)
    limit = {"subject": "tenant:acme", "kind": "usd_total", "value": 1}
    limits = [await admin.done("POST", "limits", limit, headers=headers) for _ in range(2)]
    assert limits[0] == limits[1]


async def test_a_repeated_creation_of_a_key_never_shows_it_again(admin):
    await admin.done("POST", "tenants", {"id": "acme"})
    headers = {"idempotency-key": "nightly"}
    answers = await asyncio.gather(
        *(admin.call("POST", "keys", {"tenant": "acme"}, headers=headers) for _ in range(6)),
    )
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409, 409, 409]
    made = next(answer.json() for answer in answers if answer.status_code == 200)
    for answer in answers:
        if answer.status_code == 409:
            error = answer.json()["error"]
            assert made["id"] in error["message"]
            assert "rotate" in error["message"]
            assert made["key"] not in answer.text
    assert len((await admin.done("GET", "keys", query={"tenant": "acme"}))["data"]) == 1
    assert parse(made["key"])[1] not in admin.stored_text()
    # The same key for another path is another request, and rotation is protected in the same way.
    rotated = await admin.done("POST", f"keys/{made['id']}/rotate", headers=headers)
    await admin.refused("POST", f"keys/{made['id']}/rotate", 409, headers=headers)
    assert await admin.caller(rotated["key"])
    assert len((await admin.done("GET", f"keys/{made['id']}"))["secrets"]) == 2


async def test_a_crash_after_the_work_makes_nothing_twice(admin, monkeypatch):
    await admin.done("POST", "tenants", {"id": "acme"})
    headers = {"idempotency-key": "crash"}

    async def fail(*_arguments):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(admin.store, "store_reply", fail)
        await admin.refused("POST", "keys", 500, {"tenant": "acme"}, headers=headers)
    await admin.refused("POST", "keys", 409, {"tenant": "acme"}, headers=headers)
    assert len((await admin.done("GET", "keys", query={"tenant": "acme"}))["data"]) == 1


async def test_of_two_gateways_that_get_the_same_request_the_slower_one_repeats_the_quicker(admin, monkeypatch):
    headers = {"idempotency-key": "both"}
    first = await admin.done("POST", "tenants", {"id": "acme"}, headers=headers)
    asked = []
    remembered = admin.store.find_reply

    async def too_early(*arguments):
        asked.append(arguments)
        return None if len(asked) == 1 else await remembered(*arguments)

    monkeypatch.setattr(admin.store, "find_reply", too_early)
    assert await admin.done("POST", "tenants", {"id": "acme"}, headers=headers) == first
    assert len(asked) == 2


async def test_a_page_of_budgets_comes_soon_however_few_there_are(admin):
    await admin.store.add_many(Tenant(id=f"t{number:04}") for number in range(1100))
    await admin.done("PUT", "limits/last", {"subject": "tenant:t1099", "kind": "usd_total", "value": 1})
    page = await admin.done("GET", "budgets")
    assert (page["data"], page["has_more"], page["next"]) == ([], True, "tenant:t0997")
    page = await admin.done("GET", "budgets", query={"after": page["next"]})
    assert [budget["subject"] for budget in page["data"]] == ["tenant:t1099"]
    assert not page["has_more"]


async def test_a_gateway_that_cannot_refresh_still_tells_what_it_did(admin, caplog):
    admin.refresh_fails = True
    await admin.done("POST", "tenants", {"id": "acme"})
    assert "could not be applied at once" in caplog.text
    assert admin.directory.tenant("acme") is None
    admin.refresh_fails = False
    await admin.done("POST", "tenants", {"id": "next"})
    assert admin.directory.tenant("acme") is not None


async def test_only_keys_with_the_scope_may_come_in(admin):
    await admin.done("POST", "tenants", {"id": "acme"})
    plain = await admin.done("POST", "keys", {"tenant": "acme"})
    for method, path in admin.operations():
        for key, status in ((None, 401), ("sk-mtd-nonsense", 401), (plain["key"], 403)):
            headers = {"authorization": f"Bearer {key}"} if key else {"authorization": ""}
            response = await admin.client.request(method, path.replace("{id}", "acme"), headers=headers)
            assert response.status_code == status, (method, path, response.text)
    assert (await admin.done("GET", "tenants/acme"))["id"] == "acme"
    assert ADMIN_KEY not in str((await admin.done("GET", "keys"))["data"])


async def test_a_full_server_takes_the_limit_that_relieves_it(admin):
    with ExitStack() as requests:
        for _ in range(100):
            requests.enter_context(admin.gate.acquire())
        await admin.done("PUT", "limits/relief", {"subject": "*", "kind": "concurrent_requests", "value": 50})


async def test_one_process_has_no_workers_and_cannot_be_replaced(admin):
    assert await admin.done("GET", "workers") == {"object": "list", "data": []}
    fault = await admin.refused("POST", "workers/restart", 409)
    assert "SIGTERM" in fault["message"]


async def test_replicas_are_listed_and_taken_in_and_out_of_service(tmp_path):
    async with administered(tmp_path) as system:
        listed = (await system.done("GET", "replicas"))["data"]
        assert [(replica["model"], replica["replica"], replica["state"], replica["ready"]) for replica in listed] == [
            ("m", "replica-0", "serving", True),
            ("m", "replica-1", "serving", True),
            ("n", "replica-0", "serving", True),
        ]
        assert (listed[0]["requests"], listed[0]["sequences"], listed[0]["kv_free"]) == (0, 0, 1.0)
        change = await system.done("POST", "replicas/drain", {"replica": "replica-1"})
        assert (change["model"], change["state"], change["ready"]) == ("m", "draining", False) or change[
            "state"
        ] == "maintenance"
        change = await system.done("POST", "replicas/maintenance", {"replica": "replica-0", "model": "n"})
        assert (change["state"], "maintenance" in change["outage"]) == ("maintenance", True)
        assert (await system.done("POST", "replicas/resume", {"replica": "replica-1"}))["state"] == "serving"
        fault = await system.refused("POST", "replicas/drain", 400, {"replica": "replica-0"})
        assert fault["param"] == "model"
        await system.refused("POST", "replicas/drain", 404, {"replica": "tcp:10.0.0.1:9100"})
        await system.refused("POST", "replicas/drain", 400, {"replica": "replica-0", "modell": "m"})
