"""Ten keys of three teams move from LiteLLM's PostgreSQL in three commands: they work, and spend is equal to the cent.

LiteLLM itself cannot run here with a database: its driver fetches a program when it is first used. So the tables are
made by its own schema (`litellm_proxy_extras/schema.prisma` of LiteLLM 1.106), as far as their columns are read, and
the encrypted values are its own.
"""

import hashlib
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from openai import OpenAI, RateLimitError

from maitred.testing.postgres_server import PostgresServer
from maitred.testing.scripted_openai import ServerScript, scripted_openai
from maitred.testing.server_process import serving
from tests.integration.accounts.test_litellm_compatibility import Proxy

MASTER, SALT = "sk-1234", "sk-salt-1"
CONFIG = """
model_list:
  - {model_name: a, litellm_params: {model: openai/a, api_key: none, api_base: URL/v1},
     model_info: {input_cost_per_token: 0.001, output_cost_per_token: 0.002}}
general_settings: {master_key: os.environ/LITELLM_MASTER_KEY, store_model_in_db: true}
"""
SCHEMA = """
CREATE TABLE "LiteLLM_BudgetTable" (budget_id text PRIMARY KEY, max_budget double precision, soft_budget double
    precision, max_parallel_requests int, tpm_limit bigint, rpm_limit bigint, model_max_budget jsonb, budget_duration
    text, budget_reset_at timestamp(3), created_at timestamp(3) DEFAULT now(), created_by text DEFAULT 'admin');
CREATE TABLE "LiteLLM_TeamTable" (team_id text PRIMARY KEY, team_alias text, organization_id text, admins text[],
    members text[], members_with_roles jsonb DEFAULT '{}', metadata jsonb DEFAULT '{}', max_budget double precision,
    soft_budget double precision, spend double precision DEFAULT 0, models text[], max_parallel_requests int, tpm_limit
    bigint, rpm_limit bigint, budget_duration text, budget_reset_at timestamp(3), blocked boolean DEFAULT false,
    created_at timestamp(3) DEFAULT now(), model_spend jsonb DEFAULT '{}', model_max_budget jsonb DEFAULT '{}');
CREATE TABLE "LiteLLM_VerificationToken" (token text PRIMARY KEY, key_name text, key_alias text, spend double precision
    DEFAULT 0, total_spend double precision DEFAULT 0, expires timestamp(3), models text[], aliases jsonb DEFAULT '{}',
    config jsonb DEFAULT '{}', user_id text, team_id text, permissions jsonb DEFAULT '{}', max_parallel_requests int,
    metadata jsonb DEFAULT '{}', blocked boolean, tpm_limit bigint, rpm_limit bigint, max_budget double precision,
    budget_duration text, budget_reset_at timestamp(3), allowed_cache_controls text[] DEFAULT '{}', model_spend jsonb
    DEFAULT '{}', model_max_budget jsonb DEFAULT '{}', budget_id text REFERENCES "LiteLLM_BudgetTable", created_at
    timestamp(3) DEFAULT now(), rotation_count int DEFAULT 0);
CREATE TABLE "LiteLLM_UserTable" (user_id text PRIMARY KEY, user_alias text, teams text[] DEFAULT '{}', user_role text,
    max_budget double precision, spend double precision DEFAULT 0, user_email text, models text[], metadata jsonb
    DEFAULT '{}', tpm_limit bigint, rpm_limit bigint, budget_duration text, budget_reset_at timestamp(3));
CREATE TABLE "LiteLLM_ProxyModelTable" (model_id text PRIMARY KEY, model_name text, litellm_params jsonb, model_info
    jsonb, blocked boolean DEFAULT false, created_at timestamp(3) DEFAULT now(), created_by text);
"""
TEAMS = {  # team -> its alias, budget, window and spend
    "7f3c9b52-0d5e-4a7e-9a51-1f6f0a6f2f01": ("Research", 500.0, "30d", 123.45),
    "core": ("Core", 100.0, None, 10.01),
    "ops": ("Operations", None, None, 0.0),
}
KEYS = [  # (team or user, budget, window, spend)
    *(("7f3c9b52-0d5e-4a7e-9a51-1f6f0a6f2f01", 50.0, "30d", spend) for spend in (0.01, 20.02, 49.99, 3.3333)),
    *(("core", budget, None, spend) for budget, spend in ((5.0, 4.37), (None, 2.5), (7.0, 7.0))),
    ("ops", None, None, 0.0),
    ("user:ann@example.com", 10.0, "7d", 0.07),
    ("", 1000.0, None, 999.93),
]
REFUSED = [2, 6]
"""Keys that are refused: of one budget nothing is left, and of the other less than a request can cost, for which room
is kept here before it runs."""


def texts() -> list[str]:
    return [f"sk-old-key-number-{number}" for number in range(len(KEYS))]


def quoted(value: object) -> str:
    return "NULL" if value is None else f"'{value}'"


def rows() -> str:
    """Returns the statements that fill the tables."""
    reset = (datetime.now(UTC) + timedelta(days=5)).strftime("%Y-%m-%d")
    made = ["INSERT INTO \"LiteLLM_UserTable\" (user_id, max_budget, spend) VALUES ('ann@example.com', 30, 0.07);"]
    for team, (alias, budget, window, spend) in TEAMS.items():
        made.append(
            'INSERT INTO "LiteLLM_TeamTable" (team_id, team_alias, max_budget, budget_duration, budget_reset_at, '
            f"spend) VALUES ('{team}', '{alias}', {budget or 'NULL'}, {quoted(window)}, {quoted(window and reset)}, "
            f"{spend});"
        )
    for text, (owner, budget, window, spend) in zip(texts(), KEYS, strict=True):
        user, team = (owner.removeprefix("user:"), None) if owner.startswith("user:") else (None, owner or None)
        made.append(
            'INSERT INTO "LiteLLM_VerificationToken" (token, key_name, key_alias, team_id, user_id, max_budget, '
            "budget_duration, budget_reset_at, spend, total_spend) VALUES "
            f"('{hashlib.sha256(text.encode()).hexdigest()}', 'sk-...{text[-4:]}', '{text[-8:]}', {quoted(team)}, "
            f"{quoted(user)}, {budget or 'NULL'}, {quoted(window)}, {quoted(window and reset)}, {spend}, {spend});"
        )
    return "\n".join(made)


def stored_model(url: str) -> str:
    """Returns the statement for a model that was added in LiteLLM's pages; its name is encrypted by LiteLLM 1.106."""
    params = {
        "model": "9shZsN2wC07q7Kkbv6l1y-ndTL6q1YObXeEQLdfuRxLx9-ZieB5CVUH--rJEEA==",  # gpt-4o
        "api_key": "v2:gcm:hhLK3CsMmEF-vILmmQ5TpHJSXMO9ahBXa7txSqD3p4EU7g==",  # gpt-4o, for a key
        "custom_llm_provider": "openai",
        "api_base": f"{url}/v1",
    }
    columns = "(model_id, model_name, litellm_params, model_info)"
    return f"INSERT INTO \"LiteLLM_ProxyModelTable\" {columns} VALUES ('1', 'stored', '{json.dumps(params)}', '{{}}');"


@pytest.fixture
def database(postgres_server: PostgresServer) -> str:
    url = postgres_server.database()
    postgres_server.sql(SCHEMA + rows(), url.rpartition("/")[2])
    return url


def test_keys_teams_budgets_and_spend_move_in_three_commands(
    database: str, postgres_server: PostgresServer, tmp_path: Path
):
    environment = {"LITELLM_MASTER_KEY": MASTER, "LITELLM_SALT_KEY": SALT, "STORED_API_KEY": "sk-provider"}
    with scripted_openai(ServerScript()) as upstream:
        postgres_server.sql(stored_model(upstream.url), database.rpartition("/")[2])
        (tmp_path / "config.yaml").write_text(CONFIG.replace("URL", upstream.url))
        arguments = ["import", "litellm", "config.yaml", "--keys-from", database, "--salt-key-env", "LITELLM_SALT_KEY"]
        done = subprocess.run(  # the first command
            [sys.executable, "-m", "maitred", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path), **environment},
        )
        assert "STORED_API_KEY" in done.stdout
        settings = {"store.folder": str(tmp_path / "store")}
        config = str(tmp_path / "maitred.yaml")
        with serving("--config", config, settings=settings, environment=environment) as server:  # the second
            proxy = Proxy(server.url)
            check_spend(proxy, dict.fromkeys(range(len(KEYS)), 0.0))
            spent = {number: ask(proxy, text) for number, text in enumerate(texts())}  # the third
            assert [number for number, usd in spent.items() if not usd] == REFUSED
            check_spend(proxy, spent)
            assert proxy.ask(texts()[7], "stored").choices[0].message.content
        with serving("--config", config, settings=settings, environment=environment) as server:
            check_spend(Proxy(server.url), spent)  # nothing is counted twice


def ask(proxy: Proxy, key: str) -> float:
    """Asks with an old key, by the official client; returns the cost, which is 0 if its budget is used up."""
    with OpenAI(base_url=f"{proxy.url}/v1", api_key=key, max_retries=0) as client:
        try:
            usage = client.chat.completions.create(
                model="a", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
            ).usage
        except RateLimitError:
            return 0.0
    return usage.prompt_tokens * 0.001 + usage.completion_tokens * 0.002


def check_spend(proxy: Proxy, spent: dict[int, float]) -> None:
    """Requires that keys and teams have spent what they had in LiteLLM, and what they have spent since."""
    asked = sum(map(bool, spent.values()))
    while sum(log["call_type"] != "opening-balance" for log in proxy.get("/spend/logs")) < asked:
        pass  # the ledger takes lines from the journal
    for number, (text, (_, budget, window, before)) in enumerate(zip(texts(), KEYS, strict=True)):
        info = proxy.get("/key/info", key=text)["info"]
        assert round(info["spend"], 6) == round(before + spent[number], 6), text
        assert (info["max_budget"], info["budget_duration"]) == (budget, window)
    for team, (alias, budget, window, before) in TEAMS.items():
        info = proxy.get("/team/info", team_id=team)["team_info"]
        since = sum(usd for number, usd in spent.items() if KEYS[number][0] == team)
        of_keys = sum(key[3] for key in KEYS if key[0] == team)
        counted = before if budget else max(before, of_keys)
        assert round(info["spend"], 6) == round(counted + since, 6), alias
        assert (info["team_alias"], info["max_budget"], info["budget_duration"]) == (alias, budget, window)
