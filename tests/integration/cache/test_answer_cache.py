"""Answers of real engines from the cache: among workers, among gateways, and with a Redis that goes away."""

import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from maitred.config.tree import BUNDLED_MODEL
from tests.support.console_server import consoled
from tests.support.servers.redis_server import redis_server

CONFIG = """
engine: {{threads: 1}}
model: {{path: {model}, served_name: maitred-tiny}}
cache:
  url: {{file: {url}}}
  answer_timeout_s: 10  # a crowded machine can need more than some milliseconds
"""
BODY = {"model": "maitred-tiny", "prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}


def ask(system, key, **changes):
    """Sends a request on a connection of its own."""
    response = httpx.post(
        f"{system.url}/v1/completions",
        json={**BODY, **changes},
        headers={"authorization": f"Bearer {key}"},
        timeout=300,
        trust_env=False,
    )
    assert response.status_code == 200, response.text
    return response


def computed(system, key, answers):
    """Sends a request that must be computed, and waits until the cache keeps so many answers."""
    response = ask(system, key)
    assert response.headers["x-maitred-cache"] == "miss"
    # Its client does not wait until it is kept, so an equal request could still share it.
    while sum(group["answers"] for group in system.admin.get("/admin/v1/cache").json()["data"]) != answers:
        time.sleep(0.01)
    return response


def looked_up(system, requests):
    """What an operator sees of the cache when so many look-ups are counted; workers report them a moment later."""
    while sum((shown := system.admin.get("/admin/v1/cache").json())["use"]["lookups"].values()) < requests:
        time.sleep(0.01)
    return shown


def counted(system):
    """Value of each counter of the model."""
    families = text_string_to_metric_families(system.admin.get("/metrics").text)
    return {
        (sample.name, sample.labels.get("result", "")): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("model") == "maitred-tiny"
    }


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_share_answers_and_operators_see_and_remove_them(workers):
    with consoled(engine__threads=1, server__workers=workers) as system:
        key, other = system.key("acme"), system.key("other")
        first = computed(system, key, 1)
        for _ in range(8):
            again = ask(system, key)
            assert again.headers["x-maitred-cache"] == "hit"
            assert again.headers["x-maitred-cache-key"] == first.headers["x-maitred-cache-key"]
            assert (again.json()["choices"], again.json()["usage"]) == (first.json()["choices"], first.json()["usage"])
        computed(system, other, 2)  # of another tenant
        shown = looked_up(system, 10)
        assert [(group["tenant"], group["answers"]) for group in shown["data"]] == [("acme", 1), ("other", 1)]
        assert shown["use"]["lookups"] == {"miss": 2, "hit": 8}
        usage = first.json()["usage"]
        assert shown["use"]["saved_tokens"] == 8 * usage["total_tokens"]
        value = counted(system)
        assert value["maitred_cache_lookups_total", "hit"] == 8
        assert value["maitred_cache_saved_tokens_total", ""] == 8 * usage["total_tokens"]
        assert value["maitred_prompt_tokens_total", ""] == 2 * usage["prompt_tokens"]
        assert value["maitred_output_tokens_total", ""] == 2 * usage["completion_tokens"]
        assert value["maitred_ttft_seconds_count", ""] == 2
        assert system.admin.delete("/admin/v1/cache", params={"tenant": "acme"}).json()["removed"] == 1
        assert ask(system, key).headers["x-maitred-cache"] == "miss"
        assert ask(system, other).headers["x-maitred-cache"] == "hit"


def test_gateways_share_answers_in_redis_and_go_on_without_it(tmp_path):
    with redis_server() as redis:
        (tmp_path / "url").write_text(redis.url.reveal())
        config = tmp_path / "maitred.yaml"
        config.write_text(CONFIG.format(url=tmp_path / "url", model=BUNDLED_MODEL))
        program = ("-m", "maitred", "serve", "--config", str(config))
        with consoled(program=program) as one, consoled(program=program) as two:
            keys = [system.key("acme") for system in (one, two)]
            first = computed(one, keys[0], 1)
            again = ask(two, keys[1])
            assert again.headers["x-maitred-cache"] == "hit"
            assert int(again.headers["age"]) >= 0
            assert again.json()["choices"] == first.json()["choices"]
            for system in (one, two):
                shown = system.admin.get("/admin/v1/cache").json()
                assert (shown["store"]["backend"], shown["data"][0]["answers"]) == ("redis", 1)
            name = first.headers["x-maitred-cache-key"]
            assert two.admin.delete("/admin/v1/cache", params={"key": name}).json()["removed"] == 1
            computed(one, keys[0], 1)
            redis.kill()
            for system, key in zip((one, two), keys, strict=True):
                alone = ask(system, key)
                assert alone.headers["x-maitred-cache"] == "miss"
                assert alone.json()["choices"] == first.json()["choices"]
                assert system.admin.get("/admin/v1/cache").status_code == 503
