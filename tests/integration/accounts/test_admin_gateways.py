"""Two gateways administer one PostgreSQL database at the same time."""

import asyncio
import random
from collections import Counter

import pytest

from maitred.core.secret import Secret
from maitred.store.config import StoreConfig
from tests.support.admin_app import administered
from tests.support.stores import DEADLINE_S


@pytest.fixture
async def gateways(postgres_url, tmp_path):
    def config(name):
        (tmp_path / name).mkdir()
        return StoreConfig(
            folder=str(tmp_path / name), url=Secret(postgres_url, "{env: DATABASE}"), deadline_s=DEADLINE_S
        )

    async with (
        administered(tmp_path / "a", config("a")) as first,
        administered(tmp_path / "b", config("b")) as second,
    ):
        yield first, second


async def test_what_one_changes_the_other_applies_when_it_asks(gateways):
    first, second = gateways
    await first.done("POST", "tenants", {"id": "acme"})
    key = (await second.done("POST", "keys", {"tenant": "acme"}))["key"]
    assert await first.caller(key) is None
    await first.refresher.load()
    assert await first.caller(key)
    await second.done("POST", f"keys/{key.split('-')[2]}/revoke")
    assert await second.caller(key) is None
    await first.refresher.load()
    assert await first.caller(key) is None


async def test_one_request_that_both_get_makes_one_thing(gateways):
    await gateways[0].done("POST", "tenants", {"id": "acme"})
    for number in range(5):
        headers = {"idempotency-key": f"once {number}"}
        answers = await asyncio.gather(
            *(gateway.call("POST", "keys", {"tenant": "acme"}, headers=headers) for gateway in gateways * 3)
        )
        assert Counter(answer.status_code for answer in answers) == {200: 1, 409: 5}
        limit = {"subject": "tenant:acme", "kind": "usd_per_day", "value": 1, "model": f"m{number}"}
        limits = await asyncio.gather(
            *(gateway.call("POST", "limits", limit, headers=headers) for gateway in gateways * 3)
        )
        assert {(answer.status_code, answer.text) for answer in limits} == {(200, limits[0].text)}
    assert len((await gateways[1].done("GET", "keys", query={"tenant": "acme"}))["data"]) == 5
    assert len((await gateways[0].done("GET", "limits"))["data"]) == 5


async def test_whatever_races_each_call_is_answered_and_both_see_the_same_in_the_end(gateways):
    drawn = random.Random(5)
    for name in "abc":
        await gateways[0].done("POST", "tenants", {"id": name})
        await gateways[0].done("POST", "keys", {"tenant": name, "id": name * 16})

    def some_call():
        name = drawn.choice("abc")
        return drawn.choice(
            [
                ("POST", f"keys/{name * 16}/rotate", {"overlap_s": drawn.choice([0, 60])}),
                ("PATCH", f"tenants/{name}", {"weight": drawn.randint(1, 9)}),
                ("PUT", f"limits/{name}", {"subject": f"tenant:{name}", "kind": "usd_total", "value": 5}),
                ("DELETE", f"limits/{name}", None),
                ("POST", "keys", {"tenant": name}),
                ("DELETE", f"tenants/{name}", None),
                ("POST", f"keys/{name * 16}/revoke", None),
            ]
        )

    calls = [some_call() for _ in range(60)]
    answers = await asyncio.gather(*(drawn.choice(gateways).call(*call) for call in calls))
    assert {answer.status_code for answer in answers} <= {200, 400, 404, 409}
    # A key that was shown and not rotated away since works on both, or on neither.
    for gateway in gateways:
        await gateway.refresher.load()
    shown = [answer.json()["key"] for answer in answers if answer.status_code == 200 and "key" in answer.json()]
    alive = [[key for key in shown if await gateway.caller(key)] for gateway in gateways]
    assert alive[0] == alive[1]
    known = [
        [(gateway.directory.tenant(name), gateway.directory.limits_of(f"tenant:{name}")) for name in "abc"]
        for gateway in gateways
    ]
    assert known[0] == known[1]
