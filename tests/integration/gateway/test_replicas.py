"""Several engines behind one gateway, killed at random moments under load: no client sees anything of it."""

import asyncio
import json
import random
from dataclasses import dataclass, field

import httpx
import psutil
import pytest

from maitred.testing.server_process import ServerProcess, serving
from tests.support.processes import living_children

MODEL = "maitred-tiny"
TOKENS = 120
PLAIN = {"ignore_eos": True, "max_tokens": TOKENS}
KINDS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 11, "top_p": 0.95},
    "two choices": {"temperature": 1.0, "seed": 12, "n": 2},
    "penalties": {"temperature": 0.8, "seed": 13, "n": 2, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {"5": -2.0}},
    "logprobs": {"temperature": 0.7, "seed": 14, "logprobs": 3},
    "min tokens": {"temperature": 1.0, "seed": 15, "ignore_eos": False, "min_tokens": 60, "n": 3},
    "stop": {"temperature": 0.0, "stop": [" rabbit", " little", "."], "min_tokens": 40, "ignore_eos": False},
    "two prompts": {"temperature": 0.6, "seed": 16, "prompt": ["The fox said", "In the deep wood"]},
}


@dataclass
class Answer:
    """What a client has received, choice by choice."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    usage: dict[str, object] = field(default_factory=dict)
    done: bool = False

    def same_as(self, other: "Answer") -> bool:
        return (self.texts, self.tokens, self.finishes, self._counts(), self.done) == (
            (other.texts, other.tokens, other.finishes, other._counts(), other.done)
        ) and all(self.logprobs[index] == pytest.approx(other.logprobs[index], abs=1e-3) for index in self.logprobs)

    def _counts(self) -> tuple[object, object]:
        return self.usage["prompt_tokens"], self.usage["completion_tokens"]


class Midst:
    """Moment in the midst of answers: comes with an event, at the latest when all are there.

    Args:
        events: How many clients have received by then.
    """

    def __init__(self, events: int) -> None:
        self._left = events
        self.reached = asyncio.Event()

    def count(self) -> None:
        self._left -= 1
        if not self._left:
            self.reached.set()


async def stream(client: httpx.AsyncClient, number: int, kind: str, midst: Midst) -> Answer:
    body = {
        **{"model": MODEL, "stream": True, "stream_options": {"include_usage": True}},
        **{"prompt": f"{number} animals met in the deep wood. The rabbit said:", **PLAIN, **KINDS[kind]},
        "cache": {"no-cache": True},
    }
    answer = Answer()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                answer.done = True
            elif line.startswith("data: "):
                take(answer, json.loads(line.removeprefix("data: ")))
                midst.count()
    return answer


def take(answer: Answer, event: dict[str, object]) -> None:
    assert "error" not in event, event
    answer.usage = event.get("usage") or answer.usage
    for choice in event["choices"]:
        index = choice["index"]
        answer.texts[index] = answer.texts.get(index, "") + choice["text"]
        if choice["logprobs"] is not None:
            answer.tokens.setdefault(index, []).extend(choice["logprobs"]["tokens"])
            answer.logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
        if choice["finish_reason"] is not None:
            answer.finishes[index] = choice["finish_reason"]


async def all_kinds(client: httpx.AsyncClient, midst: Midst | None = None) -> dict[str, Answer]:
    midst = midst or Midst(1)
    try:
        answers = await asyncio.gather(*(stream(client, number, kind, midst) for number, kind in enumerate(KINDS)))
    finally:
        midst.reached.set()
    return dict(zip(KINDS, answers, strict=True))


async def settled(server: ServerProcess, *, restarts: int = 0) -> dict[str, float]:
    """The metrics once nothing is in flight and so many engines were started again; fails when something stays behind.

    Whoever looks at once after a kill can see the gateway before it has noticed.
    """
    async with asyncio.timeout(300):
        while True:
            metrics = await asyncio.to_thread(server.metrics)
            left = [
                metrics[name]
                for name in (
                    *("maitred_in_flight", "maitred_dispatch_running", "maitred_dispatch_outstanding_tokens"),
                    *("maitred_engine_running", "maitred_engine_waiting", "maitred_leases"),
                )
            ]
            held = metrics["maitred_engine_kv_blocks_total"] - metrics["maitred_engine_kv_blocks_free"]
            all_up = metrics["maitred_engine_up"] == 2 and metrics["maitred_engine_restarts_total"] >= restarts
            if not any(left) and not held and all_up:
                return metrics
            await asyncio.sleep(0.05)


def engines_of(server: ServerProcess) -> list[psutil.Process]:
    return [*living_children(server.process.pid)]


async def test_streams_survive_kills_with_exactly_the_tokens_of_an_undisturbed_run():
    draw = random.Random(6)
    with serving("--replicas", "2", settings={"engine.kv_memory_bytes": "32MiB"}) as server:
        async with asyncio.timeout(300), httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            before = await settled(server)
            undisturbed = await all_kinds(client)
            received = [*undisturbed.values()]
            assert all(answer.done for answer in received)
            kills, recoveries = 0, 0.0
            while kills < 4 or not recoveries:  # an engine may be far ahead of its readers, and have ended its part
                kills += 1
                midst = Midst(draw.randrange(10, 400))  # of some 1,000
                round_ = asyncio.create_task(all_kinds(client, midst))
                await midst.reached.wait()
                draw.choice(engines_of(server)).kill()
                answers = await round_
                for kind, answer in answers.items():
                    assert answer.same_as(undisturbed[kind]), (kind, answer, undisturbed[kind])
                received += answers.values()
                metrics = await settled(server, restarts=kills)
                recoveries = metrics.get("maitred_recoveries_total", 0.0)
        assert metrics["maitred_engine_restarts_total"] == kills
        for name, count in [("prompt", "prompt_tokens"), ("output", "completion_tokens")]:
            ledger = f"maitred_ledger_{name}_tokens_total"
            assert metrics[ledger] - before.get(ledger, 0.0) == sum(answer.usage[count] for answer in received)
        assert server.stop() == 0
