"""Keys, teams and budgets are read from a database with LiteLLM's tables, and the keys work at a running server."""

import hashlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from maitred.core.errors import ConfigInvalid
from maitred.migration.litellm.database import read_accounts
from maitred.testing.postgres_server import PostgresServer
from maitred.testing.scripted_openai import ServerScript, scripted_openai
from maitred.testing.server_process import serving

KEY = "sk-fj39fkD0ls2mZ"
MASTER = "sk-1234"
CONFIG = """
model_list: [{model_name: a, litellm_params: {model: openai/a, api_key: none, api_base: URL/v1}}]
general_settings: {master_key: sk-1234}
"""
TABLES = f"""
CREATE TABLE "LiteLLM_TeamTable" (team_id text, team_alias text, models text[], spend float, max_budget float,
    budget_duration text, budget_reset_at timestamp, metadata jsonb, blocked boolean);
INSERT INTO "LiteLLM_TeamTable" VALUES ('t1', 'Research', '{{a}}', 12.34, 50, '30d', '2026-12-01', '{{}}', false);
CREATE TABLE "LiteLLM_VerificationToken" (token text, key_alias text, team_id text, spend float, max_budget float,
    models text[], expires timestamp, rpm_limit bigint);
INSERT INTO "LiteLLM_VerificationToken" VALUES
    ('{hashlib.sha256(KEY.encode()).hexdigest()}', 'ci', 't1', 0.75, 10, '{{}}', '2099-01-01', 100);
"""


@pytest.fixture
def litellm_database(postgres_server: PostgresServer) -> str:
    url = postgres_server.database()
    postgres_server.sql(TABLES, url.rpartition("/")[2])
    return url


def asked(url: str, key: str) -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_old_keys_work_after_one_command(litellm_database: str, tmp_path: Path):
    with scripted_openai(ServerScript()) as upstream:
        (tmp_path / "config.yaml").write_text(CONFIG.replace("URL", upstream.url))
        arguments = ["import", "litellm", "config.yaml", "--keys-from", litellm_database]
        done = subprocess.run(
            [sys.executable, "-m", "maitred", *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert "database:keys[0].token -> tenants.t1.teams.key-ci.keys.ci.sha256" in done.stdout
        environment = {"LITELLM_MASTER_KEY": MASTER}
        with serving("--config", str(tmp_path / "maitred.yaml"), environment=environment) as server:
            status, models = asked(f"{server.url}/v1/models", KEY)
            assert (status, [model["id"] for model in json.loads(models)["data"]]) == (200, ["a"])
            assert asked(f"{server.url}/admin/v1/tenants", KEY)[0] == 403
            status, limits = asked(f"{server.url}/admin/v1/limits", MASTER)
            assert status == 200
            values = {limit["kind"]: limit["value"] for limit in json.loads(limits)["data"]}
            assert values == {"usd_per_month": 50, "usd_total": 10, "requests_per_minute": 100}


def test_a_file_of_litellm_is_served_as_it_is(tmp_path: Path):
    body = json.dumps({"model": "a", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}).encode()
    with scripted_openai(ServerScript()) as upstream:
        file = tmp_path / "config.yaml"
        file.write_text(CONFIG.replace("URL", upstream.url).replace("api_key: none", "api_key: sk-literal"))
        with serving("--config", str(file)) as server:
            assert "5 keys: 4 mapped, 1 mapped approximately" in server.log.read_text()
            head = {"Authorization": f"Bearer {MASTER}", "Content-Type": "application/json"}
            request = urllib.request.Request(f"{server.url}/v1/chat/completions", data=body, headers=head)
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.load(response)["choices"][0]["message"]["content"]


def test_a_database_that_cannot_be_read_is_said_without_its_url():
    with pytest.raises(ConfigInvalid) as caught:
        read_accounts("postgresql://user:hidden@127.0.0.1:9/nowhere")
    assert "hidden" not in str(caught.value)


def test_two_gateways_are_compared(tmp_path: Path):
    """Another gateway stands for the old one: one before the same server, and one before a server that counts more."""

    def served(upstream: str) -> tuple[str, str]:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.yaml"
        file.write_text(json.dumps({"models": {"a": {"upstreams": [{"url": f"{upstream}/v1"}]}}}))
        return "--config", str(file)

    def compared(url: str, *more: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "maitred", "import", "shadow", url, "--url", ours.url, *more]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    (tmp_path / "r.jsonl").write_text(
        '{"model": "a", "messages": [{"role": "user", "content": "x"}], "temperature": 0}'
    )
    with (
        scripted_openai(ServerScript()) as upstream,
        scripted_openai(ServerScript(template_tokens=40)) as other,
        serving(*served(upstream.url)) as ours,
        serving(*served(upstream.url)) as alike,
        serving(*served(other.url)) as theirs,
    ):
        done = compared(alike.url)
        assert (done.returncode, "4 requests: 4 answered alike" in done.stdout) == (0, True), done.stdout + done.stderr
        done = compared(theirs.url, "--requests", "r.jsonl")
        assert (done.returncode, "prompt_tokens: theirs 41, ours 5" in done.stdout) == (1, True), done.stdout
        done = compared("http://127.0.0.1:9")
        assert (done.returncode, "127.0.0.1:9" in done.stderr) == (1, True), done.stdout + done.stderr
