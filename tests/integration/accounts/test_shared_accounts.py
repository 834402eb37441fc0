"""Two gateways with one Redis, one PostgreSQL and one engine: one account between them."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
from msgspec import structs

from maitred.app.assembly.stores import open_stores
from maitred.config.tree import Config
from maitred.core.clock import SystemClock
from maitred.core.counters import CounterKind, LimitClaim, Reservation, ReservationGranted
from maitred.core.secret import Secret
from maitred.identity.keys import make_key
from maitred.store.config import StoreConfig
from maitred.store.counters.config import CountersConfig
from maitred.store.journal import Journal
from maitred.testing.server_process import serving
from tests.support.servers.redis_server import redis_server
from tests.support.stores import DEADLINE_S
from tests.support.usage_events import usage_event

LIMIT_S = 300.0
COST_USD = 0.001 * 4 + 0.002 * 8
"""Of one request: four tokens of prompt, eight of answer."""

CONFIG = """
admission:
  lease_s: 2
  prices:
    "*": {prompt: 1000, output: 2000}
store:
  url: {env: DATABASE}
counters:
  url: {env: REDIS}
  recovery_s: 0
  slice_share: 0.1
  answer_timeout_s: 5
tenants:
  acme:
    limits: {usd_total: 1, requests_per_minute: 6000}
    keys:
      one: {secret: {env: ACME_KEY}}
  other:
    keys:
      two: {secret: {env: OTHER_KEY}}
  house:
    keys:
      admin: {secret: {env: ADMIN_KEY}, scopes: [admin]}
"""


@contextmanager
def two_gateways(folder, redis, database, keys, *arguments):
    (folder / "maitred.yaml").write_text(CONFIG)
    environment = {
        "PYTHONPATH": f"{Path.cwd()}:{Path.cwd() / 'src'}",
        "DATABASE": database,
        "REDIS": redis.url.reveal(),
        **keys,
    }
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                serving(
                    *("--config", str(folder / "maitred.yaml"), *arguments),
                    settings={"server.allow_unauthenticated": "false"},
                    environment=environment,
                    program=("-m", "tests.support.scripted_gateway"),
                )
            )
            for _ in range(2)
        ]


@pytest.fixture
def redis():
    with redis_server() as server:
        yield server


@pytest.fixture
def keys():
    return {name: make_key().plaintext for name in ("ACME_KEY", "OTHER_KEY", "ADMIN_KEY")}


def complete(server, key):
    body = {"model": "maitred-tiny", "prompt": "one two three", "max_tokens": 8}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-api-key": key}, timeout=LIMIT_S)


def admin(server, keys, path, **query):
    answer = httpx.get(f"{server.url}/admin/v1/{path}", params=query, headers={"x-api-key": keys["ADMIN_KEY"]})
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def eventually(condition, what):
    deadline_s = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)
    return found


def complete_many(gateways, key, count):
    """Many callers at once, half of them at each gateway; the answers."""
    with ThreadPoolExecutor(8) as callers:
        return list(callers.map(lambda turn: complete(gateways[turn % 2], key), range(count)))


def test_two_gateways_cannot_spend_one_budget_twice(tmp_path, redis, postgres_url, keys):
    with two_gateways(tmp_path, redis, postgres_url, keys) as gateways:
        answers = complete_many(gateways, keys["ACME_KEY"], 80)
        served = [answer for answer in answers if answer.status_code == 200]
        assert {answer.status_code for answer in answers} == {200, 429}
        eventually(
            lambda: sum(row["requests"] for row in admin(gateways[0], keys, "usage", group_by="tenant")) == len(served),
            "the ledger lacks lines",
        )
        (row,) = admin(gateways[1], keys, "usage", group_by="tenant")
        assert row["cost_usd"] <= 1
        # What nobody holds in advance was used: at most a slice of each gateway, and the last answer, may be left.
        assert row["cost_usd"] >= 0.8
        (budget,) = admin(gateways[1], keys, "budgets", subject="tenant:acme")
        assert budget["charged_usd"] == pytest.approx(row["cost_usd"])
        assert budget["reserved_usd"] <= 0.2


def test_a_key_that_one_gateway_revokes_is_refused_by_the_other(tmp_path, redis, postgres_url, keys):
    with two_gateways(tmp_path, redis, postgres_url, keys) as (here, there):
        operator = {"x-api-key": keys["ADMIN_KEY"]}
        # Of a tenant without a budget: a fast machine would use that up before the other gateway looks for changes.
        made = httpx.post(f"{here.url}/admin/v1/keys", json={"tenant": "other"}, headers=operator).json()
        eventually(lambda: complete(there, made["key"]).status_code == 200, "the other gateway does not know the key")
        httpx.post(f"{here.url}/admin/v1/keys/{made['id']}/revoke", headers=operator).raise_for_status()
        began_s = time.monotonic()
        while (status := complete(there, made["key"]).status_code) != 401:
            assert status in (200, 503), status  # 503: what a crowded machine makes of a Redis that is late
            assert time.monotonic() - began_s < LIMIT_S


def test_without_redis_keys_work_and_nothing_fails_open(tmp_path, redis, postgres_url, keys):
    with two_gateways(tmp_path, redis, postgres_url, keys) as gateways:
        for answer in complete_many(gateways, keys["ACME_KEY"], 10):
            assert answer.status_code == 200
        time.sleep(1.5)  # slices are made in the background, once a second
        redis.kill()
        away = complete_many(gateways, keys["ACME_KEY"], 20)
        assert {answer.status_code for answer in away} <= {200, 503}, [a.text for a in away]
        served_away = sum(answer.status_code == 200 for answer in away)
        assert 0 < served_away * COST_USD <= 2 * CountersConfig().busy_slice_share + 1e-9, (
            "more than the slices was given, or nothing"
        )
        health = httpx.get(f"{gateways[0].url}/health/ready").json()
        assert (health["status"], health["away"]) == ("degraded", ["counters"])
        redis.start()
        for gateway in gateways:
            eventually(
                lambda gateway=gateway: httpx.get(f"{gateway.url}/health/ready").json()["status"] == "ok", "still away"
            )
        answers = complete_many(gateways, keys["ACME_KEY"], 80)
        assert {answer.status_code for answer in answers} == {200, 429}
        served = 10 + served_away + sum(answer.status_code == 200 for answer in answers)
        (row,) = eventually(
            lambda: (
                (rows := admin(gateways[0], keys, "usage", group_by="tenant"))
                and rows[0]["requests"] >= served
                and rows
            ),
            "the ledger lacks lines",
        )
        assert row["cost_usd"] <= 1 + 2 * CountersConfig().busy_slice_share


async def test_usage_that_a_dead_gateway_could_not_settle_is_charged_where_all_count(tmp_path, redis, postgres_url):
    config = structs.replace(
        Config(),
        store=StoreConfig(folder=str(tmp_path), url=Secret(postgres_url, "{env: DATABASE}"), deadline_s=DEADLINE_S),
        counters=CountersConfig(url=redis.url, recovery_s=0, answer_timeout_s=10.0),
    )
    claim = LimitClaim("spend|tenant:acme|total", CounterKind.BUDGET, capacity=1000, fixed=300)
    async with open_stores(config, SystemClock()) as stores:
        assert isinstance(
            await stores.counters.reserve(Reservation("use-1", [claim], 1, 1, lease_s=30)), ReservationGranted
        )
        # It dies after the usage was journaled and before the counters were updated.
        journal = Journal(tmp_path / "journal")
        journal.record(usage_event(1, id="use-1", charges={claim.counter: 200}))
        journal.close()
        (held,) = await stores.counters.read([claim])
        assert (held.used, held.reserved) == (0, 300)
    for _ in range(2):  # once, however often gateways start
        async with open_stores(config, SystemClock()) as stores:
            (settled,) = await stores.counters.read([claim])
            assert (settled.used, settled.reserved) == (200, 0)


def test_a_response_in_the_background_is_everywhere_the_same(tmp_path, redis, postgres_url, keys):
    """Seen, cancelled and streamed at the gateway beside its own; and ended by it when its own is killed."""
    stalled = '{"answers": [{"fault": "stall", "fault_after": 3}]}'
    asked = {"model": "maitred-tiny", "input": "one two three", "max_output_tokens": 100, "background": True}
    with two_gateways(tmp_path, redis, postgres_url, keys, "--script", stalled) as gateways, ExitStack() as stack:
        here, there = (
            stack.enter_context(
                openai.OpenAI(base_url=f"{server.url}/v1", api_key=keys["ACME_KEY"], timeout=LIMIT_S, max_retries=0)
            )
            for server in gateways
        )

        def begin():
            response = here.responses.create(**asked)
            assert there.responses.retrieve(response.id).status in ("queued", "in_progress")
            eventually(lambda: here.responses.retrieve(response.id).output_text, "nothing is written")
            assert there.responses.retrieve(response.id).status == "in_progress"
            return response.id

        first = begin()
        stranger = there.with_options(api_key=keys["OTHER_KEY"]).responses
        for use in (stranger.retrieve, stranger.cancel, stranger.delete, partial(stranger.retrieve, stream=True)):
            with pytest.raises(openai.NotFoundError):
                use(first)
        cancelled = there.responses.cancel(first)
        assert (cancelled.status, cancelled.usage.output_tokens) == ("cancelled", 3)
        assert here.responses.cancel(first) == cancelled

        second = begin()
        assert there.responses.delete(second) is None
        with pytest.raises(openai.NotFoundError):
            here.responses.retrieve(second)

        third = begin()
        with there.responses.retrieve(third, stream=True) as stream:
            gateways[0].process.kill()
            events = [event.type for event in stream]
        assert events[-1] == "response.failed"
        lost = there.responses.retrieve(third)
        assert (lost.status, lost.error.code) == ("failed", "server_error")
        (row,) = admin(gateways[1], keys, "usage", group_by="tenant")
        each_usd = 0.001 * cancelled.usage.input_tokens + 0.002 * 3
        assert row["cost_usd"] == pytest.approx(2 * each_usd), "what was lost costs nothing"
