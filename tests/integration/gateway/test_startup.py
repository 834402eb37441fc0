"""Starts that are cut short, or that must not be: what they leave, and what they say."""

import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest

from maitred.identity.keys import make_key
from maitred.testing.server_process import free_port
from tests.integration.accounts.test_accounts import admin, complete, eventually, installation

LIMIT_S = 300.0

pytestmark = pytest.mark.usefixtures("new_interpreters")


@pytest.fixture
def keys():
    return {name: make_key().plaintext for name in ("SEARCH_KEY", "BUSY_KEY", "ADMIN_KEY")}


@contextmanager
def starting(folder, *arguments, program=("-m", "tests.support.scripted_gateway")):
    """A gateway that nobody waits for; its log."""
    log = folder / f"start-{free_port()}.log"
    data = folder / "data"
    command = [sys.executable, *program, "--port", "0", f"--set=store.folder={data}", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()


def test_an_admin_key_that_was_made_is_shown_even_if_the_engine_never_comes_up(tmp_path):
    with starting(tmp_path, "--script", '{"load_s": 600}') as (process, log):
        key = eventually(lambda: re.findall(r"sk-mtd-\S+", log.read_text()), "no key is shown")[0]
        process.send_signal(signal.SIGKILL)
        process.wait()
    with installation(tmp_path, {}, config="") as server:
        assert httpx.get(f"{server.url}/admin/v1/tenants", headers={"x-api-key": key}).status_code == 200
        assert "sk-mtd-" not in server.log.read_text()


def test_a_second_gateway_on_one_folder_is_refused_and_one_after_a_kill_is_not(tmp_path, keys):
    nowhere = f"unix:{tmp_path}/nobody.sock"
    with installation(tmp_path, keys) as server:
        with starting(tmp_path, "--engine", nowhere, program=("-m", "maitred", "serve")) as (second, log):
            assert second.wait(LIMIT_S) == 2
            assert f"Another gateway uses {tmp_path / 'data'}" in log.read_text()
            assert "Traceback" not in log.read_text()
        assert complete(server, keys["SEARCH_KEY"]).status_code == 200
        server.process.kill()
        server.process.wait()
    with installation(tmp_path, keys) as server:
        assert complete(server, keys["SEARCH_KEY"]).status_code == 200


def test_a_log_of_everything_shows_neither_keys_nor_what_is_kept(tmp_path, keys):
    with installation(tmp_path, keys, log__level="debug") as server:
        assert complete(server, keys["SEARCH_KEY"]).status_code == 200
        wrong = make_key().plaintext
        assert complete(server, wrong).status_code == 401
        eventually(lambda: admin(server, keys, "usage/events")["data"], "nothing is written")
        log = server.log.read_text()
    assert "DEBUG" in log
    for key in (*keys.values(), wrong):
        assert key[-43:] not in log
    assert "INSERT INTO" not in log
