"""docs/limits.md is right: its commands run, its configuration serves, and its example adds up."""

import os
import re
import shlex
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import typer.main

from maitred.cli.app import app
from maitred.config.default_model import MODEL_NAME
from maitred.config.loader import load
from maitred.core.context import Outcome
from maitred.core.errors import QuotaExceeded, RateLimited
from maitred.core.request import Usage
from maitred.core.usage import NANO
from maitred.testing.server_process import serving
from tests.support.admission_services import AdmissionSetup, limit

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8").replace(MODEL_NAME, "maitred-tiny")
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
COMMANDS, DECLARED = SECTIONS["A team with a key, in two minutes"], SECTIONS["In the configuration file"]
KEY_ID = re.compile(r"sk-mtd-([a-z0-9]{16})-")


def yaml_of(section: str) -> str:
    """The first configuration in a section."""
    (found,) = re.findall(r"```yaml\n(.*?)```", section, re.S)[:1]
    return found


def script_of(section: str) -> str:
    """Its commands, but for those that serve."""
    return "\n".join(command for command in re.findall(r"^\$ (.+)$", section, re.M) if command != "maitred serve")


def shell(script: str, folder: Path, **environment: object) -> str:
    """Runs commands as a reader would, and stops at the first that fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installation(folder: Path, config: str, environment: dict[str, str]):
    """A gateway with this configuration, on a scripted engine."""
    path = folder / "maitred.yaml"
    path.write_text(config, encoding="utf-8")
    return serving(
        "--config",
        str(path),
        environment={"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", **environment},
        program=("-m", "tests.support.scripted_gateway"),
    )


def test_the_commands_work_on_a_fresh_installation(tmp_path):
    with installation(tmp_path, yaml_of(COMMANDS), {}) as server:
        (admin_key,) = re.findall(r"export MAITRED_ADMIN_KEY=(\S+)", server.log.read_text())
        printed = shell(script_of(COMMANDS), tmp_path, MAITRED_URL=server.url, MAITRED_ADMIN_KEY=admin_key)
        assert "100,000" in printed
        headers = {"x-api-key": admin_key}
        rules = httpx.get(f"{server.url}/admin/v1/limits", headers=headers, timeout=300).json()["data"]
        assert sorted((rule["subject"], rule["kind"], rule["value"]) for rule in rules) == [
            ("key:*", "concurrent_requests", 8),
            ("tenant:acme", "usd_per_month", 40),
            ("tenant:acme", "usd_per_month", 50),
            ("tenant:anonymous", "requests_per_minute", 60),
            ("tenant:research", "tokens_per_minute", 100000),
        ]
        budgets = httpx.get(f"{server.url}/admin/v1/budgets?subject=tenant:acme", headers=headers, timeout=300).json()[
            "data"
        ]
        assert all(budget["charged_usd"] > 0 for budget in budgets)
        body = {"model": "maitred-tiny", "prompt": "one", "max_tokens": 4}
        anonymous = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
        assert (anonymous.status_code, anonymous.headers["x-ratelimit-limit-requests"]) == (200, "60")


def test_the_configuration_serves_whom_it_declares(tmp_path):
    (tmp_path / "maitred.yaml").write_text(yaml_of(DECLARED), encoding="utf-8")
    script = script_of(DECLARED) + '\necho "$RESEARCH_KEY $HOUSE_KEY"'
    research, operator = shell(script, tmp_path).split()[-2:]
    with installation(tmp_path, yaml_of(DECLARED), {"RESEARCH_KEY": research, "HOUSE_KEY": operator}) as server:
        body = {"model": "maitred-tiny", "prompt": "one two three", "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-api-key": research}, timeout=300)
        assert (answer.status_code, answer.headers["x-ratelimit-limit-tokens"]) == (200, "20000")
        keys = httpx.get(f"{server.url}/admin/v1/keys", headers={"x-api-key": operator}, timeout=300).json()["data"]
        assert {key["id"] for key in keys} == {KEY_ID.match(key)[1] for key in (research, operator)}
        assert "export MAITRED_ADMIN_KEY" not in server.log.read_text()


def test_the_commands_of_the_readme_exist():
    section = re.search(r"^## Keys, limits and budgets\n(.*?)^## ", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    examples = re.findall(r"^\$ (maitred .+)$", section, re.M)
    assert len(examples) > 4
    for example in examples:
        words = shlex.split(example)[1:]
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context("maitred", words)


def test_the_configuration_of_several_gateways_is_sound(tmp_path):
    path = tmp_path / "maitred.yaml"
    path.write_text(yaml_of(SECTIONS["One gateway, or several"]), encoding="utf-8")
    config = load(path, {"DATABASE_URL": "postgresql://a@b/c", "REDIS_URL": "redis://b"}).config
    assert config.store.url is not None
    assert config.counters.url is not None


async def test_the_example_adds_up():
    rows = re.findall(r"^\| .+? \| \$([\d.]+) \| \$([\d.]+) \|", SECTIONS["Reserve, clamp, settle"], re.M)
    table = iter((float(reserved), float(charged)) for reserved, charged in rows)

    async def spent(counters):
        return {counter: int(0.95 * NANO) for counter in counters}

    setup = AdmissionSetup(
        limit("tenant:acme", "usd_per_day", NANO), price={"prompt": 10.0, "output": 30.0}, spent=spent
    )

    async def stands_as_written():
        (state,) = await setup.admission.budgets("tenant:acme")
        assert (state.reserved / NANO, state.charged / NANO) == pytest.approx(next(table), abs=1e-9)

    async def comes(stack, tokens):
        grant = await stack.enter_async_context(setup.admit(500, 1000))
        assert grant.max_tokens == tokens
        return grant

    async with AsyncExitStack() as stack:
        a = await comes(stack, 1000)
        await stands_as_written()
        b = await comes(stack, 333)
        await stands_as_written()
        with pytest.raises(RateLimited):
            await comes(stack, 0)
        await stands_as_written()
        await a.settle(Usage(500, 200), Outcome.FINISHED)
        await stands_as_written()
        c = await comes(stack, 633)
        await stands_as_written()
        await b.settle(Usage(500, 333), Outcome.FINISHED)
        await stands_as_written()
        await c.settle(Usage(500, 633), Outcome.FINISHED)
        await stands_as_written()
        with pytest.raises(QuotaExceeded):
            await comes(stack, 0)
        await stands_as_written()
    assert next(table, None) is None
