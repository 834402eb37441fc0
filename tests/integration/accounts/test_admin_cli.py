"""The administration's commands against real HTTP and a real file."""

import asyncio
import json
import os
import re
import sys

import msgspec
import pytest
from typer.testing import CliRunner, Result

from maitred.cli.app import app
from maitred.core.tenancy import Principal, Tenant
from maitred.core.usage import Feedback
from maitred.identity.keys import parse
from maitred.store.feedback import FeedbackStore
from tests.integration.accounts.test_admin_api import event
from tests.support.admin_app import ADMIN_KEY, Administered, administered


class Operator:
    """Someone at a terminal."""

    def __init__(self, system: Administered) -> None:
        self.system = system

    async def run(self, *arguments: str, key: str | None = ADMIN_KEY, url: str | None = None) -> Result:
        env = {"MAITRED_URL": url or self.system.url, "MAITRED_ADMIN_KEY": key, "COLUMNS": "200", "TERM": "dumb"}
        return await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=env)

    async def does(self, *arguments: str) -> str:
        result = await self.run(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    async def cannot(self, *arguments: str, code: int = 2, **more: str | None) -> str:
        result = await self.run(*arguments, **more)
        assert (result.exit_code, result.stdout) == (code, ""), result.output
        assert result.stderr.count("\n") == 1, result.stderr
        return result.stderr


@pytest.fixture
async def operator(tmp_path):
    async with administered(tmp_path) as system:
        yield Operator(system)


def rows(text):
    """The cells of a printed table."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


async def test_tenants(operator):
    await operator.does("tenants", "create", "acme", "--name", "Acme [bold]Inc.")
    await operator.does(
        *("tenants", "create", "research", "--parent", "acme", "--weight", "2", "--model", "a", "--model", "b"),
        *("--priority-ceiling", "7", "--region", "eu", "--tag", "local-only"),
    )
    assert rows(await operator.does("tenants", "list")) == [
        ["TENANT", "PARENT", "NAME", "WEIGHT", "MODELS", "PRIORITY", "REGIONS", "TAGS", "DISABLED"],
        ["acme", "-", "Acme [bold]Inc.", "1", "all", "-", "-", "-", "no"],
        ["operators", "-", "-", "1", "all", "-", "-", "-", "no"],
        ["research", "acme", "-", "2", "a, b", "7", "eu", "local-only", "no"],
    ]
    assert [row[0] for row in rows(await operator.does("tenants", "list", "--parent", "acme"))] == [
        "TENANT",
        "research",
    ]
    await operator.does("tenants", "update", "research", "--all-models", "--disable", "--weight", "3")
    shown = json.loads(await operator.does("tenants", "show", "research", "--json"))
    assert [(entry["models"], entry["disabled"], entry["weight"], entry["tags"]) for entry in shown] == [
        (None, True, 3.0, ["local-only"])
    ]
    await operator.does("tenants", "update", "research", "--enable")
    assert await operator.does("tenants", "delete", "research") == "Deleted research.\n"
    assert "no tenant" in await operator.cannot("tenants", "show", "research")
    assert "no tenant" in await operator.cannot("tenants", "show", "../keys")


async def test_lists_longer_than_a_page(operator):
    await operator.system.store.add_many(Tenant(id=f"t{number:03}") for number in range(205))
    assert len(json.loads(await operator.does("tenants", "list", "--json"))) == 206


async def test_keys(operator):
    await operator.does("tenants", "create", "acme")
    made = await operator.run("keys", "create", "acme", "--name", "ci", "--scope", "metrics", "--expires", "90d")
    key = made.stdout.strip()
    public_id, _ = parse(key)
    assert made.stdout == f"{key}\n"  # a script can take it from there
    assert "cannot be shown again" in made.stderr
    assert await operator.system.caller(key)
    (listed,) = rows(await operator.does("keys", "list", "--tenant", "acme"))[1:]
    assert listed[:4] == [public_id, "acme", "ci", "metrics"]
    assert listed[5] == "valid"
    rotated = (await operator.does("keys", "rotate", public_id, "--overlap", "1h")).splitlines()[0]
    assert await operator.system.caller(key)
    assert await operator.system.caller(rotated)
    assert "in rotation" in await operator.does("keys", "list")
    last = json.loads(await operator.does("keys", "rotate", public_id, "--overlap", "0", "--json"))
    assert await operator.system.caller(rotated) is None
    assert await operator.does("keys", "revoke", public_id) == f"Revoked {public_id}.\n"
    assert await operator.system.caller(last["key"]) is None
    assert "revoked" in await operator.does("keys", "list")
    assert "--overlap must be a time" in await operator.cannot("keys", "rotate", public_id, "--overlap", "soon")
    assert "--expires must be a time" in await operator.cannot("keys", "create", "acme", "--expires", "soon")
    assert "no tenant" in await operator.cannot("keys", "create", "nobody")


async def test_cache_controls_of_keys(operator):
    await operator.does("tenants", "create", "acme")
    for words, controls in (((), None), (("none",), []), (("no-store", "ttl"), ["no-store", "ttl"])):
        options = [part for word in words for part in ("--cache-control", word)]
        assert (
            json.loads(await operator.does("keys", "create", "acme", *options, "--json"))["cache_controls"] == controls
        )
    refusal = await operator.cannot("keys", "create", "acme", "--cache-control", "max-age")
    assert "must be one of no-cache" in refusal
    assert "cache_controls" not in refusal


async def test_limits(operator):
    await operator.does("tenants", "create", "acme")
    arguments = ("limits", "set", "tenant:acme", "tokens_per_minute", "100000", "--model", "maitred-tiny")
    assert rows(await operator.does(*arguments, "--burst", "20000"))[1][1:] == [
        *("tenant:acme", "tokens_per_minute", "100,000", "maitred-tiny", "20,000", "-")
    ]
    await operator.does(*arguments[:4], "500", "--model", "maitred-tiny")
    await operator.does("limits", "set", "tenant:acme", "usd_per_month", "50.25")
    await operator.does("limits", "set", "tenant:acme", "usd_per_month", "40", "--soft")
    await operator.does("limits", "set", "key:*", "concurrent_requests", "8")
    listed = rows(await operator.does("limits", "list", "--subject", "tenant:acme"))[1:]
    assert sorted(row[1:] for row in listed) == [
        ["tenant:acme", "tokens_per_minute", "500", "maitred-tiny", "-", "-"],
        ["tenant:acme", "usd_per_month", "$40", "all", "-", "no"],
        ["tenant:acme", "usd_per_month", "$50.25", "all", "-", "yes"],
    ]
    budgets = rows(await operator.does("limits", "budgets"))
    assert sorted(row[:7] for row in budgets[1:]) == [
        ["tenant:acme", "usd_per_month", "all", "40", "0", "0", "40"],
        ["tenant:acme", "usd_per_month", "all", "50.25", "0", "0", "50.25"],
    ]
    assert await operator.does("limits", "delete", listed[0][0]) == f"Deleted {listed[0][0]}.\n"
    assert "no limit" in await operator.cannot("limits", "delete", listed[0][0])
    assert "VALUE must be at least 1" in await operator.cannot("limits", "set", "*", "requests_per_minute", "--", "-5")
    assert "VALUE must be" in await operator.cannot("limits", "set", "*", "requests_per_minute", "nan")
    assert "VALUE must be" in await operator.cannot("limits", "set", "*", "usd_total", "inf")
    assert "SUBJECT must be" in await operator.cannot("limits", "set", "acme", "usd_total", "5")
    assert "KIND must be one of" in await operator.cannot("limits", "set", "*", "usd_per_year", "5")


async def test_setting_one_limit_at_once_sets_it_once(operator):
    command = (sys.executable, "-m", "maitred", "limits", "set", "*", "requests_per_minute")
    env = {**os.environ, "MAITRED_URL": operator.system.url, "MAITRED_ADMIN_KEY": ADMIN_KEY}
    out = asyncio.subprocess.DEVNULL
    processes = [await asyncio.create_subprocess_exec(*command, str(value), env=env, stdout=out) for value in (1, 2, 3)]
    assert [await process.wait() for process in processes] == [0, 0, 0]
    assert len(rows(await operator.does("limits", "list"))) == 2


async def test_usage(operator):
    now_s = operator.system.clock.wall_s()
    await operator.system.record(
        [event(number, time_s=now_s - 60, tenant=tenant) for number, tenant in enumerate(("acme", "acme", "research"))]
    )
    await operator.system.record([event(9, time_s=now_s - 86_400 * 20, tenant="past")])
    hit = event(10, time_s=now_s - 60, tenant="research", prompt_tokens=0, output_tokens=0, cost_nusd=0)
    await operator.system.record([msgspec.structs.replace(hit, cache="exact", saved_tokens=15)])
    system = operator.system
    acme = Principal(key="5b1f0c9e7d2a4c6f", tenants=("acme",), scopes=frozenset())
    await FeedbackStore(system.database, system.ledger.flush, system.clock).store(acme, "req-0", Feedback(score=0.75))
    assert rows(await operator.does("usage", "--since", "7d")) == [
        ["TENANT", "MODEL", "REQUESTS", "PROMPT", "CACHED", "OUTPUT", "USD", "HITS", "SAVED", "RATED", "SCORE"],
        ["acme", "m", "2", "20", "0", "10", "0.003", "0", "0", "1", "0.75"],
        ["research", "m", "2", "10", "0", "5", "0.0015", "1", "15", "0", "-"],
    ]
    assert len(rows(await operator.does("usage", "--group-by", "tenant", "--organisation", "acme"))) == 4
    csv = await operator.does("usage", "--group-by", "tenant", "--since", "7d", "--csv")
    assert csv.splitlines()[1].startswith("acme,2,20,0,10,")
    (total,) = json.loads(await operator.does("usage", "--group-by", "", "--key-id", "5b1f0c9e7d2a4c6f", "--json"))
    assert (total["requests"], total["cache_hits"], total["saved_tokens"]) == (5, 1, 15)
    assert "--group-by must hold" in await operator.cannot("usage", "--group-by", "colour")
    assert "--since must be a time" in await operator.cannot("usage", "--since", "yesterday")


async def test_every_failure_is_a_sentence(operator):
    assert "An admin key is needed" in await operator.cannot("tenants", "list", key="")
    assert "characters that no key has" in await operator.cannot("tenants", "list", key="sk-mtd-\nx")
    assert "characters that no key has" in await operator.cannot("tenants", "list", key="ключ")
    assert "invalid_api_key" in await operator.cannot("tenants", "list", key="sk-mtd-wrong")
    await operator.does("tenants", "create", "acme")
    plain = (await operator.does("keys", "create", "acme")).splitlines()[0]
    assert "scope" in await operator.cannot("usage", key=plain)
    assert "Nothing answers" in await operator.cannot("usage", url="http://127.0.0.1:1", code=1)
    assert "not an address" in await operator.cannot("usage", url="acme")
    assert ADMIN_KEY not in (await operator.run("tenants", "list", "--help")).output


async def test_refusals_name_the_option_and_not_the_field_of_the_api(operator):
    for arguments, says, hides in (
        (("keys", "create", "operators", "--expires", "2001-01-01"), "--expires must lie", "expires_at"),
        (("tenants", "create", "acme", "--priority-ceiling", "11"), "--priority-ceiling", "priority_ceiling"),
        (("tenants", "create", "acme", "--weight", "0"), "--weight", " weight"),
        (("keys", "create", "operators", "--scope", "admni"), "--scope must be one of", "scopes"),
        (("usage", "--until", "tomorrow"), "--until must be a time", "end must"),
    ):
        message = await operator.cannot(*arguments)
        assert says in message
        assert hides not in message


@pytest.mark.parametrize(
    "arguments",
    [
        ("keys", "create", "operators", "--expires", "90"),
        ("keys", "create", "operators", "--expires", "soon"),
        ("keys", "rotate", "5b1f0c9e7d2a4c6f", "--overlap", "3600"),
    ],
)
async def test_a_time_needs_its_unit(operator, arguments):
    message = await operator.cannot(*arguments)
    assert f"{arguments[-2]} must be a time with its unit" in message


async def test_a_key_that_has_expired_is_listed_as_such(operator):
    for expires_s in (0.01, 1, 10):  # a busy machine gets there only when a short time is over
        made = await operator.run("keys", "create", "operators", "--expires", f"{expires_s}s", "--json")
        if made.exit_code == 0:
            break
    key = json.loads(made.output)["id"]
    await asyncio.sleep(expires_s)
    assert await listed_state(operator, key) == "expired"


async def listed_state(operator, key):
    """The last column of the row of a key."""
    return {row[0]: row[-1] for row in rows(await operator.does("keys", "list"))}[key]
