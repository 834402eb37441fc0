"""`maitred explain` tells what happened to requests, through two real processes."""

import json
import os
import time

import httpx
import pytest
from typer.testing import CliRunner

from maitred.cli.app import app
from maitred.testing.server_process import serving

SECRET = "my grandmother's maiden name is Featherstonehaugh"


@pytest.fixture(scope="module")
def server():
    settings = {"engine.threads": 1, "engine.kv_memory_bytes": 64 << 20, "model.replicas": 2, "explain.requests": 4}
    with serving(settings=settings) as running:
        until_up(running, 2)
        yield running


def until_up(server, replicas, timeout_s=300):
    """It is ready with the first of them."""
    until_s = time.monotonic() + timeout_s
    while server.metrics().get("maitred_engine_up", 0) < replicas:
        assert time.monotonic() < until_s, server.log.read_text()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def admin(server):
    line = next(line for line in server.log.read_text().splitlines() if "MAITRED_ADMIN_KEY=" in line)
    return line.partition("=")[2].strip()


def explain(server, admin, *arguments):
    env = {**os.environ, "MAITRED_URL": server.url, "MAITRED_ADMIN_KEY": admin, "TERM": "dumb"}
    return CliRunner().invoke(app, ["explain", *arguments], env=env)


def ask(server, request_id, **fields):
    body = {"model": "maitred-tiny", "prompt": f"{SECRET}. " * 4, "max_tokens": 6, "ignore_eos": True, **fields}
    return httpx.post(
        f"{server.url}/v1/completions", json=body, headers={"x-request-id": request_id}, timeout=300
    ).raise_for_status()


def test_the_whole_timeline_of_a_request(server, admin):
    ask(server, "first")
    ask(server, "second", temperature=0.5)
    result = explain(server, admin, "second", "--json")
    assert result.exit_code == 0, result.output
    timeline = json.loads(result.stdout)
    assert (timeline["outcome"], timeline["status"], timeline["output_tokens"]) == ("finished", 200, 6)
    assert timeline["parameters"] == {"max_tokens": 6, "temperature": 0.5}
    spans = {span["name"]: span for span in timeline["chapters"]}
    assert [*spans] == ["resolve", "plan", "admission", "queue", "routing", "attempt", "settlement"]
    begun = [span["at_ms"] for span in timeline["chapters"]]
    assert begun == sorted(begun)
    candidates = spans["routing"]["facts"]["candidates"]
    assert {candidate["replica"] for candidate in candidates} == {"local-0", "local-1"}
    # The prompt is the same, so it is known where its beginning lies.
    (chosen,) = [candidate for candidate in candidates if candidate["held_tokens"]]
    assert spans["routing"]["facts"]["replica"] == chosen["replica"]
    (engine,) = spans["attempt"]["inside"]
    assert [span["name"] for span in engine["inside"]] == ["engine.queue", "prefill", "decode"]
    _, prefill, decode = engine["inside"]
    assert prefill["facts"]["cached_tokens"] == timeline["cached_tokens"] > 0
    assert decode["facts"]["steps"] >= 1
    assert engine["at_ms"] >= spans["attempt"]["at_ms"]
    last = spans["attempt"]["at_ms"] + spans["attempt"]["took_ms"]
    assert engine["at_ms"] + engine["took_ms"] <= last
    assert spans["settlement"]["facts"]["output_tokens"] == 6


def test_for_people_it_is_a_table_without_a_word_of_the_prompt(server, admin):
    ask(server, "for-people")
    result = explain(server, admin, "for-people")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["REQUEST", "for-people"] in lines
    assert any("prefill" in line for line in lines)
    assert any("taken" in line for line in lines)
    assert "Featherstonehaugh" not in result.stdout
    assert "Featherstonehaugh" not in explain(server, admin, "for-people", "--json").stdout


def test_a_refused_request_has_a_timeline_too(server, admin):
    with pytest.raises(httpx.HTTPStatusError):
        ask(server, "refused", model="unheard-of")
    timeline = json.loads(explain(server, admin, "refused", "--json").stdout)
    assert (timeline["outcome"], timeline["status"], timeline["error"]) == ("refused", 404, "model_not_found")
    assert [(span["name"], span["error"]) for span in timeline["chapters"]] == [("resolve", "model_not_found")]


def test_the_last_ones_are_listed_and_older_ones_forgotten(server, admin):
    for number in range(5):
        ask(server, f"one-{number}")
    listed = explain(server, admin).stdout
    assert "one-4" in listed
    assert "one-1" in listed
    assert "one-0" not in listed
    result = explain(server, admin, "one-0")
    assert result.exit_code == 2
    assert "explain.requests" in result.output
