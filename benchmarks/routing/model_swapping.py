"""Three models and memory for two: every answer right, waits as predicted, and few loads.

Three models are made of the bundled one, with some of their weights changed, so that each answers differently. First a
server that holds all three answers every prompt with each of them, one request after the other: these are the right
answers. Then a server that holds two of them at a time gets two kinds of traffic:

- **alternating**: callers that ask one model after the other, each at its own pace, without pauses;
- **skewed**: requests as a Poisson process, most of them for one model, some for the second, few for the third.

Every answer is greedy and must be the right one. For each request that had to wait for a load, or was predicted that it
would have to, the time of its first token is compared with the server's prediction when it came. The loads are counted,
and beside them those that as many requests cost where each is served in the order in which it came and the least
recently used model is unloaded for one that is not there. Callers that wait for their answers then ask in turn,
whatever order they asked in here; the skewed requests come in the same order under both.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import psutil
import uvloop

from benchmarks.support.report import Report
from maitred.config.tree import BUNDLED_MODEL
from maitred.fleet.process import process_memory_bytes
from maitred.fleet.residency.config import ResidencyConfig
from maitred.testing.server_process import ServerProcess, serving
from maitred.testing.variants import make_variant

SEED = 20261122
MODELS = ("red", "green", "blue")
PLACES = 2
MODEL_BYTES = 450 << 20
"""What each counts; the estimate for these is 440 MiB."""
TURN_LOADS = ResidencyConfig().turn_loads
PROMPTS = 8
TOKENS = 24
CALLERS = 9
SHARES = (0.7, 0.25, 0.05)
PER_S = 4.0
SECONDS, QUICK_SECONDS = 50.0, 12.0
ENDS_WITHIN_S = 90.0
COLD_S = 0.5
"""A wait that was predicted to be at least so long, or turned out so, is one for a load: others take a tenth of it."""


@dataclass(frozen=True)
class Answer:
    """One request and what came."""

    model: str
    prompt: int
    sent_s: float
    text: str
    whole: bool
    first_token_s: float
    predicted_s: float
    """Until the first token, as the server predicted when the request came."""


class Caller:
    """Sends requests.

    Args:
        client: The connections.
        url: Of the server.
    """

    def __init__(self, client: aiohttp.ClientSession, url: str) -> None:
        self._client = client
        self._url = url
        self.answers: list[Answer] = []

    async def ask(self, model: str, prompt: int) -> None:
        """One request, read to its end."""
        body = {
            **{"model": model, "stream": True, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True},
            "prompt": f"{prompt + 2} children found a door in the old wall, and behind it",
        }
        sent_s, first_s, text, whole, predicted_s = time.monotonic(), 0.0, "", False, 0.0
        try:
            async with self._client.post(f"{self._url}/v1/completions", json=body) as response:
                predicted_s = int(response.headers.get("x-maitred-predicted-ttft-ms", 0)) / 1000
                async for line in response.content:
                    event = line.removeprefix(b"data: ").strip()
                    if not line.startswith(b"data: "):
                        continue
                    if event == b"[DONE]":
                        whole = True
                        continue
                    first_s = first_s or time.monotonic()
                    text += "".join(choice["text"] for choice in json.loads(event).get("choices", ()))
        except (aiohttp.ClientError, TimeoutError):
            whole = False
        self.answers.append(Answer(model, prompt, sent_s, text, whole, first_s - sent_s, predicted_s))

    async def alternate(self, seconds: float) -> None:
        """Callers that go from model to model, each from another one at its start."""
        end_s = time.monotonic() + seconds

        async def one(number: int) -> None:
            for turn in itertools.count():
                if time.monotonic() >= end_s:
                    return
                await self.ask(MODELS[(number + turn) % len(MODELS)], (number + turn) % PROMPTS)

        await asyncio.gather(*(one(number) for number in range(CALLERS)))

    async def skew(self, seconds: float, draw: random.Random) -> None:
        """Requests that come whatever becomes of the others."""
        end_s = time.monotonic() + seconds
        asking: set[asyncio.Task[None]] = set()
        while time.monotonic() < end_s:
            await asyncio.sleep(draw.expovariate(PER_S))
            (model,) = draw.choices(MODELS, SHARES)
            asking.add(asyncio.create_task(self.ask(model, draw.randrange(PROMPTS))))
        await asyncio.gather(*asking)


@dataclass(frozen=True)
class Played:
    """One kind of traffic, and what it cost."""

    answers: Sequence[Answer]
    metrics: dict[str, float]
    """What the counters went up by."""
    most_bytes: int
    """That all engines took together, by the system's own account."""
    seconds: float


def main() -> int:
    """Runs the benchmark; the exit code says whether every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS:g} s of each traffic")
    parser.add_argument("--seconds", type=float, help=f"of each traffic, in place of {SECONDS:g}")
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    report = Report("model_swapping", seed=arguments.seed, quick=arguments.quick)
    seconds = arguments.seconds or (QUICK_SECONDS if arguments.quick else SECONDS)
    with TemporaryDirectory(prefix="maitred-") as folder:
        for number, name in enumerate(MODELS, start=1):
            make_variant(BUNDLED_MODEL, Path(folder) / name, number)
        uvloop.run(run(report, Path(folder), seconds, arguments.seed))
    return report.finish()


async def run(report: Report, folder: Path, seconds: float, seed: int) -> None:
    """All of it."""
    # The second server knows from the first how long loads take, as after any restart.
    kept = {"MAITRED__STORE__FOLDER": str(folder / "data")}
    with serving("--config", configured(folder, places=len(MODELS)), environment=kept) as server:
        right = await _undisturbed(server)
    with serving("--config", configured(folder, places=PLACES), environment=kept) as server:
        async with _client() as client:
            alternating = Caller(client, server.url)
            first = await _played(server, alternating, alternating.alternate(seconds))
            skewed = Caller(client, server.url)
            second = await _played(server, skewed, skewed.skew(seconds, random.Random(seed)))
    _judge(report, right, {"alternating": first, "skewed": second})


def configured(folder: Path, *, places: int) -> str:
    """A configuration with room for so many of the models."""
    path = folder / f"{places}.yaml"
    config: dict[str, Any] = {
        "log": {"level": "warning"},
        "engine": {"kv_memory_bytes": "64MiB", "max_sequences": 16},
        "residency": {"memory_bytes": places * MODEL_BYTES, "turn_loads": TURN_LOADS},
        "models": {name: {"path": str(folder / name), "memory_bytes": MODEL_BYTES} for name in MODELS},
    }
    path.write_text(json.dumps(config))
    return str(path)


def _client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=ENDS_WITHIN_S), connector=aiohttp.TCPConnector(limit=0)
    )


async def _undisturbed(server: ServerProcess) -> dict[tuple[str, int], str]:
    async with _client() as client:
        caller = Caller(client, server.url)
        for model in MODELS:
            for prompt in range(PROMPTS):
                await caller.ask(model, prompt)
    return {(answer.model, answer.prompt): answer.text for answer in caller.answers if answer.whole}


async def _played(server: ServerProcess, caller: Caller, traffic: Coroutine[Any, Any, None]) -> Played:
    before = await asyncio.to_thread(server.metrics)
    began_s = time.monotonic()
    playing = asyncio.create_task(traffic)
    most_bytes = 0
    while not playing.done():
        most_bytes = max(most_bytes, await asyncio.to_thread(_taken, server))
        await asyncio.wait({playing}, timeout=0.5)
    await playing
    after = await asyncio.to_thread(server.metrics)
    gained = {name: after[name] - before.get(name, 0.0) for name in after}
    return Played(caller.answers, gained, most_bytes, time.monotonic() - began_s)


def _taken(server: ServerProcess) -> int:
    """What the engines take, their parts of shared memory included."""
    try:
        return sum(process_memory_bytes(engine.pid) for engine in psutil.Process(server.process.pid).children())
    except psutil.NoSuchProcess:
        return 0


def lru_loads(models: Sequence[str], places: int) -> int:
    """Loads of requests that are served in this order, the least recently used model unloaded for each miss."""
    there: list[str] = []
    loads = 0
    for model in models:
        if model in there:
            there.remove(model)
        else:
            loads += 1
            del there[: max(0, len(there) + 1 - places)]
        there.append(model)
    return loads


def in_order(traffic: str, answers: Sequence[Answer]) -> list[str]:
    """Which models as many requests of this traffic ask for, one after the other, if each is served in its order."""
    if traffic == "alternating":
        return [MODELS[(number % CALLERS + number // CALLERS) % len(MODELS)] for number in range(len(answers))]
    return [answer.model for answer in sorted(answers, key=lambda one: one.sent_s)]


def _judge(report: Report, right: dict[tuple[str, int], str], played: dict[str, Played]) -> None:
    report.require("answers of the undisturbed run", len(right), at_least=len(MODELS) * PROMPTS)
    distinct = [len({right.get((model, prompt)) for model in MODELS}) for prompt in range(PROMPTS)]
    report.require("prompts that all models answer differently", distinct.count(len(MODELS)), at_least=PROMPTS)
    errors: list[float] = []
    report.figures = {"models": len(MODELS), "places": PLACES, "turn_loads": TURN_LOADS}
    for name, traffic in played.items():
        cold = [
            answer
            for answer in traffic.answers
            if max(answer.predicted_s, answer.first_token_s) >= COLD_S and answer.whole
        ]
        relative = [abs(answer.predicted_s - answer.first_token_s) / answer.first_token_s for answer in cold]
        errors += relative
        loads = traffic.metrics["maitred_model_loads_total"]
        naive = lru_loads(in_order(name, traffic.answers), PLACES)
        report.figures[name] = {
            "requests": len(traffic.answers),
            "by_model": dict(Counter(answer.model for answer in traffic.answers)),
            "seconds": round(traffic.seconds, 1),
            "loads": loads,
            "load_s": round(traffic.metrics["maitred_model_load_seconds_total"] / max(1, loads), 2),
            "loads_in_order_of_arrival": naive,
            "part_of_the_time_of_a_place_spent_loading": round(
                traffic.metrics["maitred_model_load_seconds_total"] / PLACES / traffic.seconds, 3
            ),
            "first_token_s": _spread([answer.first_token_s for answer in traffic.answers]),
            "waits_for_a_load": len(cold),
            "predicted_s": _spread([answer.predicted_s for answer in cold]),
            "came_s": _spread([answer.first_token_s for answer in cold]),
            "error_s": _spread([abs(answer.predicted_s - answer.first_token_s) for answer in cold]),
            "relative_error": _spread(relative),
            "most_mib": traffic.most_bytes >> 20,
        }
        print(name, report.figures[name], flush=True)
        wrong = sum(
            answer.text != right.get((answer.model, answer.prompt)) or not answer.whole for answer in traffic.answers
        )
        report.require(f"{name}: answers that are wrong or not whole", wrong, at_most=0)
        report.require(f"{name}: loads, of those in order of arrival", loads / max(1, naive), at_most=0.5)
        budget_mib = PLACES * MODEL_BYTES >> 20
        report.require(f"{name}: most memory, MiB", traffic.most_bytes >> 20, at_most=budget_mib)
    report.require("waits for a load, median relative error", _at(errors, 0.5), at_most=0.25)
    report.require("waits for a load, relative error of nine in ten", _at(errors, 0.9), at_most=0.6)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {f"p{round(share * 100)}": round(_at(values, share), 3) for share in (0.5, 0.9, 1.0)}


def _at(values: Sequence[float], share: float) -> float:
    """The value that so large a part of them does not pass."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


if __name__ == "__main__":
    sys.exit(main())
