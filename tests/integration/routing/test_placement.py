"""Conversations on two engines: the next turn goes where the last one left its prefix."""

import random
import time

import httpx

from maitred.testing.server_process import serving

CONVERSATIONS = 3
"""Odd, so that going in turn between two engines does not happen to keep them apart."""
TURNS = 4


def words(seed: int, count: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(["fox", "rabbit", "river", "wood", "little", "house", "sang"]) for _ in range(count))


def cached(policy: str) -> tuple[int, int]:
    """Prompt tokens of all turns after the first: those of the turn before them, and those found in a cache."""
    settings = {"engine.kv_memory_bytes": "32MiB", "routing.balance.policy": policy}
    found = known = 0
    with serving("--replicas", "2", settings=settings) as server:
        while server.metrics()["maitred_engine_up"] < 2:
            time.sleep(0.05)
        with httpx.Client(base_url=server.url, timeout=300) as client:
            prompts = [f"{number} " + words(number, 120) for number in range(CONVERSATIONS)]
            before = [0] * CONVERSATIONS
            for number in list(range(CONVERSATIONS)) * TURNS:
                ask = {"model": "maitred-tiny", "prompt": prompts[number], "max_tokens": 4}
                reply = client.post("/v1/completions", json=ask)
                assert reply.status_code == 200, reply.text
                usage = reply.json()["usage"]
                found += usage["prompt_tokens_details"]["cached_tokens"]
                known += before[number]
                before[number] = usage["prompt_tokens"]
                prompts[number] += " " + words(100 + number + len(prompts[number]), 30)
        assert server.stop() == 0
    return known, found


def test_the_next_turn_finds_the_cache_of_the_last() -> None:
    known, found = cached("predicted_ttft")
    assert found > 0.85 * known


def test_in_turn_it_often_does_not() -> None:
    known, found = cached("weighted")
    assert found < 0.85 * known


def test_a_prompt_that_the_engine_holds_is_foretold_to_take_less_time() -> None:
    foretold_ms: dict[str, list[int]] = {"new": [], "held": []}
    with serving(settings={"engine.kv_memory_bytes": "32MiB"}) as server:
        with httpx.Client(base_url=server.url, timeout=300) as client:
            for number in range(12):  # the first of them are what the model of steps is learnt from
                for kind in ("new", "held"):
                    ask = {"model": "maitred-tiny", "prompt": f"{number} " + words(number, 900), "max_tokens": 1}
                    reply = client.post("/v1/completions", json=ask)
                    assert reply.status_code == 200, reply.text
                    cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                    assert (cached > 0) == (kind == "held")
                    foretold_ms[kind].append(int(reply.headers["x-maitred-predicted-ttft-ms"]))
        assert server.stop() == 0
    assert max(foretold_ms["held"][6:]) < min(foretold_ms["new"][6:]) / 2, foretold_ms
