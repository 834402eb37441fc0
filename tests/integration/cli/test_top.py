"""`maitred top` on a real server: once, as JSON, second by second, and in a terminal where it outlives the server."""

import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from tests.support.console_server import consoled

TOP = [sys.executable, "-m", "maitred", "top"]


@pytest.fixture(scope="module")
def system():
    with consoled(program=("-m", "tests.support.scripted_gateway")) as running:
        running.key("acme")
        running.put("limits/acme", {"subject": "tenant:acme", "kind": "requests_per_minute", "value": 60})
        yield running


def top(system, *options, key=None):
    environment = {**os.environ, "MAITRED_URL": system.url, **({} if key is None else {"MAITRED_ADMIN_KEY": key})}
    return subprocess.run([*TOP, *options], env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_once_it_shows_everything_to_an_administrator(system):
    key = system.key("acme")
    question = {"model": "nothing", "messages": [{"role": "user", "content": "Hello"}]}
    system.admin.post("/v1/chat/completions", json=question, headers={"authorization": f"Bearer {key}"})
    shown = top(system, "--once", key=system.admin_key)
    assert shown.returncode == 0, shown.stderr
    for phrase in (
        "decoding",
        "QUEUE",
        "ENGINE",
        "REPLICA",
        "maitred-tiny local",
        "acme",
        "requests_per_minute",
        "model_not_found",
    ):
        assert phrase in shown.stdout
    assert "\x1b" not in shown.stdout


def test_json_is_one_object_once_and_a_line_each_second_otherwise(system):
    once = json.loads(top(system, "--once", "--json", key=system.admin_key).stdout)
    assert once["path"].keys() == {"arriving", "queued", "prefilling", "decoding"}
    environment = {**os.environ, "MAITRED_URL": system.url}
    with subprocess.Popen([*TOP, "--json"], env=environment, stdout=subprocess.PIPE, text=True) as running:
        lines = [json.loads(running.stdout.readline()) for _ in range(3)]
        running.terminate()
    assert lines[0]["at"] < lines[1]["at"] < lines[2]["at"]
    assert lines[0]["tenants"] == []  # nobody said who looks


def test_what_is_wrong_is_one_sentence(system):
    for key, code, reason in (("sk-mtd-wrong", 2, "not valid"), (system.key("acme"), 2, "scope `metrics`")):
        refused = top(system, "--once", key=key)
        assert (refused.returncode, reason in refused.stderr) == (code, True), refused.stderr
    gone = subprocess.run(
        [*TOP, "--once", "--url", "http://127.0.0.1:9"], capture_output=True, text=True, timeout=300, check=False
    )
    assert gone.returncode == 1
    assert gone.stderr.startswith("Nothing answers at http://127.0.0.1:9.")


def test_in_a_terminal_it_goes_on_when_the_server_is_gone():
    with consoled(program=("-m", "tests.support.scripted_gateway")) as system:
        terminal, side = pty.openpty()
        environment = {
            **os.environ,
            "MAITRED_URL": system.url,
            "TERM": "xterm-256color",
            "COLUMNS": "120",
            "LINES": "40",
        }
        with subprocess.Popen(TOP, env=environment, stdin=side, stdout=side, stderr=side) as running:
            os.close(side)
            try:
                wait_for(terminal, b"REPLICA")
                system.server.stop()
                wait_for(terminal, b"Trying again")
                assert running.poll() is None
            finally:
                running.kill()
                os.close(terminal)


def wait_for(terminal, text, timeout_s=300.0):
    """Reads until it has been written."""
    written = b""
    deadline_s = time.monotonic() + timeout_s
    while text not in written:
        assert time.monotonic() < deadline_s, written[-2000:]
        if select.select([terminal], [], [], 0.2)[0]:
            written += os.read(terminal, 65536)
