"""Pinned prefixes: from the administration to the cached tokens of a request, under pressure, with real processes."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from maitred.testing.server_process import serving

SYSTEM = {
    "role": "system",
    "content": "You tell stories about a small village by the sea, where nobody is late. " * 6,
}
PRESSURE = 12


@pytest.fixture(scope="module")
def server():
    # Memory for about 2,000 tokens: prompts of others take all that is not pinned.
    settings = {"engine.context_tokens": 512, "engine.pins.share_each": 0.25}
    with serving("--kv-memory", "8MiB", "--max-sequences", "8", settings=settings) as running:
        yield running


@pytest.fixture
def admin(server):
    key = re.search(r"sk-mtd-\S+", server.log.read_text())[0]
    with httpx.Client(base_url=server.url, timeout=300, headers={"x-api-key": key}) as client:
        yield client


def cached_tokens(server, user):
    body = {"model": "maitred-tiny", "messages": [SYSTEM, {"role": "user", "content": user}], "max_tokens": 4}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300).raise_for_status().json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def press(server):
    def one(number):
        body = {"model": "maitred-tiny", "prompt": f"{number} " * 100, "max_tokens": 60}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(one, range(PRESSURE))) == {200}


def test_a_pinned_prefix_is_found_whatever_others_need(server, admin):
    cached_tokens(server, "one")
    press(server)
    assert cached_tokens(server, "two") == 0, "without a pin it is evicted"
    made = admin.post(
        "/admin/v1/pins",
        json={"model": "maitred-tiny", "messages": [SYSTEM], "tenant": "anonymous", "name": "village", "ttl_s": 600},
    )
    assert made.status_code == 200, made.text
    pin = made.json()
    assert pin["replicas"] == ["local"]
    block = 16
    held = server.metrics()["maitred_engine_kv_blocks_pinned"]
    assert held == pin["tokens"] // block
    for number in range(2):
        press(server)
        assert cached_tokens(server, f"after {number}") >= (held - 1) * block
    assert server.metrics()["maitred_engine_pins_given_up_total"] == 0
    assert [item["id"] for item in admin.get("/admin/v1/pins").json()["data"]] == [pin["id"]]
    again = admin.post(
        "/admin/v1/pins", json={"model": "maitred-tiny", "messages": [SYSTEM], "tenant": "anonymous", "name": "village"}
    ).json()
    assert [item["id"] for item in admin.get("/admin/v1/pins").json()["data"]] == [again["id"]]
    assert server.metrics()["maitred_engine_kv_blocks_pinned"] == held
    assert admin.delete(f"/admin/v1/pins/{again['id']}").json()["deleted"]
    assert admin.get("/admin/v1/pins").json()["data"] == []
    press(server)
    assert server.metrics()["maitred_engine_kv_blocks_pinned"] == 0
    assert cached_tokens(server, "three") == 0


def test_pins_end_with_their_time_and_with_sleep(server, admin):
    body = {"model": "maitred-tiny", "messages": [SYSTEM], "tenant": "anonymous"}
    admin.post("/admin/v1/pins", json={**body, "ttl_s": 0.2}).raise_for_status()
    while server.metrics()["maitred_engine_kv_blocks_pinned"]:
        pass  # the engine lets go by itself
    assert admin.get("/admin/v1/pins").json()["data"] == []
    admin.post("/admin/v1/pins", json=body).raise_for_status()
    admin.post("/admin/v1/models/sleep", json={"model": "maitred-tiny"}).raise_for_status()
    while not server.metrics()["maitred_engine_asleep"]:
        pass
    assert admin.get("/admin/v1/pins").json()["data"][0]["replicas"] == []
    assert server.metrics()["maitred_engine_kv_blocks_pinned"] == 0
    assert cached_tokens(server, "awake") == 0


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"prompt": "x"}, 400, "only whole blocks of 16 are pinned"),
        ({"prompt": "a b c d " * 118}, 400, "the pins of this tenant may hold"),
        ({}, 400, "Send either prompt or messages"),
        ({"prompt": [10**9]}, 400, "Token ids run from 0 to"),
        ({"prompt": "x", "model": "nobody"}, 404, "No engine of maitred's runs a model called 'nobody'"),
    ],
)
def test_what_cannot_be_pinned_is_refused_with_the_reason(server, admin, fields, status, reason):
    refused = admin.post("/admin/v1/pins", json={"model": "maitred-tiny", "tenant": "anonymous", **fields})
    assert (refused.status_code, reason in refused.json()["error"]["message"]) == (status, True), refused.text


def test_only_operators_pin(server):
    assert httpx.post(f"{server.url}/admin/v1/pins", json={}).status_code == 401
    assert httpx.get(f"{server.url}/admin/v1/pins").status_code == 401


def test_pins_from_the_command_line(server, admin, tmp_path):
    key = admin.headers["x-api-key"]

    def maitred(*words):
        command = [sys.executable, "-m", "maitred", "pins", *words, "--url", server.url, "--key", key]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    (tmp_path / "system.txt").write_text(SYSTEM["content"])
    of_the_village = ("--tenant", "anonymous", "--name", "village", "--ttl-s", "600")
    held = maitred("hold", "maitred-tiny", "--system", str(tmp_path / "system.txt"), *of_the_village, "--json")
    assert held.returncode == 0, held.stderr
    (pin,) = json.loads(held.stdout)
    assert (pin["name"], pin["tenant"], pin["replicas"]) == ("village", "anonymous", ["local"])
    assert cached_tokens(server, "again") >= pin["tokens"] // 16 * 16 - 16
    listed = next(line.split() for line in maitred("list").stdout.splitlines() if line.startswith(pin["id"]))
    assert listed[1:5] == ["maitred-tiny", "anonymous", "village", str(pin["tokens"])]
    assert maitred("release", pin["id"]).stdout == f"Released {pin['id']}.\n"
    assert pin["id"] not in maitred("list", "--json").stdout
    gone = maitred("release", pin["id"])
    assert gone.returncode == 2
    assert gone.stderr.startswith(f"There is no pin '{pin['id']}'.")
    assert maitred("hold", "maitred-tiny").returncode == 2
