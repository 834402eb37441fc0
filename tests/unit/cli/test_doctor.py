"""`maitred doctor`: what it prints, and with which code it exits."""

import json

import pytest
from typer.testing import CliRunner

from maitred.cli.app import app
from maitred.testing.server_process import free_port


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture
def written(tmp_path):
    def write(text):
        (tmp_path / "maitred.yaml").write_text(text)
        return str(tmp_path / "maitred.yaml")

    return write


def test_a_configuration_without_traps(written):
    result = run("--config", written("server: {port: 9000}\n"))
    assert (result.exit_code, result.stdout.startswith("No trap in ")) == (0, True)


def test_a_suspicious_setting_is_reported_with_evidence_and_remedy(written):
    result = run("--config", written("server: {heartbeat_s: 60}\n"))
    assert result.exit_code == 1
    head, evidence, remedy = result.stdout.splitlines()
    assert head == "1. config (server.heartbeat_s): Proxies will cut streams that wait."
    assert evidence.startswith("   A stream may be silent for 60 s")
    assert remedy.strip() == "→ Lower it to 15 s."


def test_findings_for_programs(written):
    result = run("--json", "--config", written("server: {heartbeat_s: 60}\n"))
    report = json.loads(result.stdout)
    assert (report["healthy"], result.exit_code) == (False, 1)
    assert report["findings"][0]["kind"] == "config"
    assert run("--json", "--config", written("")).stdout == '{\n  "healthy": true,\n  "findings": []\n}\n'


def test_faults_come_before_traps(written):
    result = run("--config", written("server: {prot: 9000}\n"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "prot" in result.stderr


def test_a_server_that_is_not_there():
    result = run("--url", f"http://127.0.0.1:{free_port()}")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Nothing answers" in result.stderr
