"""Responses in the background of a gateway that is killed, and of one that is stopped: real processes."""

import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from maitred.identity.keys import make_key
from maitred.testing.server_process import serving

USER, ADMIN = (make_key().plaintext for _ in range(2))
PRICE = 10.0
"""Dollars for a million tokens."""
SCRIPT = '{"answers": [{"fault": "stall", "fault_after": 3}, {}], "again": true}'
"""Every other answer does not end by itself."""
ASKED = {"model": "maitred-tiny", "input": "Hello", "max_output_tokens": 20, "background": True}


@contextmanager
def gateway(folder):
    settings = {
        "server": {"drain_grace_s": 0.1},
        "store": {"folder": str(folder / "data")},
        "admission": {"prices": {"*": {"prompt": PRICE, "output": PRICE}}},
        "tenants": {
            "acme": {"keys": {"user": {"secret": {"env": "USER_KEY"}}}},
            "house": {"keys": {"admin": {"secret": {"env": "ADMIN_KEY"}, "scopes": ["admin"]}}},
        },
    }
    file = folder / "maitred.yaml"
    file.write_text(yaml.safe_dump(settings))
    with (
        serving(
            *("--script", SCRIPT, "--config", str(file)),
            environment={
                "PYTHONPATH": f"{Path.cwd()}:{Path.cwd() / 'src'}",
                "MAITRED__STORE__FOLDER": str(folder / "data"),
                "USER_KEY": USER,
                "ADMIN_KEY": ADMIN,
            },
            program=("-m", "tests.support.scripted_gateway"),
        ) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=USER, timeout=300, max_retries=0) as client,
    ):
        yield server, client


def eventually(condition):
    deadline_s = time.monotonic() + 300
    while not (found := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return found


def begin(client):
    """A response that does not end by itself, and one that has ended."""
    running = client.responses.create(**ASKED)
    eventually(lambda: client.responses.retrieve(running.id).output_text)
    done = client.responses.create(**ASKED)
    return running, eventually(
        lambda: (found := client.responses.retrieve(done.id)).status not in ("queued", "in_progress") and found
    )


def cost_usd(server):
    usage = httpx.get(f"{server.url}/admin/v1/usage", params={"group_by": "tenant"}, headers={"x-api-key": ADMIN})
    return usage.json()["data"][0]["cost_usd"]


@pytest.mark.parametrize("is_killed", [True, False])
def test_what_a_gateway_leaves_behind_has_failed_and_costs_nothing(tmp_path, is_killed):
    with gateway(tmp_path) as (server, client):
        running, done = begin(client)
        assert done.status == "incomplete"
        if is_killed:
            server.process.kill()
        else:
            assert server.stop() == 0
    with gateway(tmp_path) as (server, client):
        lost = eventually(lambda: (found := client.responses.retrieve(running.id)).status != "in_progress" and found)
        assert (lost.status, lost.error.code) == ("failed", "server_error")
        assert client.responses.cancel(running.id) == lost
        with client.responses.retrieve(running.id, stream=True, extra_query={"starting_after": 5}) as stream:
            (last,) = stream
        assert (last.type, last.response) == ("response.failed", lost)
        assert client.responses.retrieve(done.id) == done
        assert cost_usd(server) == pytest.approx(PRICE / 1e6 * done.usage.total_tokens)
