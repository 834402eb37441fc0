"""A soak under attack: all sorts of traffic and all attacks in rotation for ten minutes, and nothing may creep.

One server as in `attacks`. Callers of several sorts ask all the time: streams and whole answers of three APIs, tools,
schemas, embeddings, some that fail, some that leave. Meanwhile the attacks of `attacks` take turns, all of them in each
tenth of the time. Between tenths nobody asks or attacks, and the server is looked at.

* **Answers**: every sort gets what it should, however the attacks go.
* **Memory** is what the gateway and each engine have allocated (`Pss_Anon` and `Pss_Shmem`). Growth is the mean of the
  last half of the tenths over the mean of the first half, both without the tenths in which caches and pools fill.
  Workers that compile grammars are told apart: they are replaced when a grammar takes too long.
* **Afterwards** nothing is in flight, queued or leased, no sequence runs, every KV block is free, no engine was started
  again, and there are as many tasks as after the first tenths.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import uvloop

from benchmarks.chaos.attacks import ENGINE_MODULE, left_behind, organisations, settings, until_engines_are_up
from benchmarks.engine.soak import allocated_mib
from benchmarks.support.chaos.attack_cases import ATTACKS, EMBEDDINGS, ENCODER
from benchmarks.support.chaos.attacker_process import AttackerProcess
from benchmarks.support.concurrent_callers import PLAIN_TOKENS, WORDS
from benchmarks.support.installation import MODEL, Key
from benchmarks.support.report import Report
from benchmarks.support.single_request import CHAT, COMPLETIONS, Call, Client, Reply
from benchmarks.support.tenant_gateway import merged, served
from maitred.testing.server_process import ServerProcess

SEED = 20261126
MINUTES, QUICK_MINUTES = 10.0, 0.5
TENTHS, WARM = 10, 4
CALLERS = 6
PAUSE_S = 0.1
"""Of each caller, between two requests."""
LEAVES_S = 0.05
SMALL_CACHES = {"engine": {"kv_memory_bytes": 64 << 20}, "model": {"tokenizer_cache_bytes": 1 << 20}}
"""So that they are turned over all the time: memory of larger ones would be touched for the first time for long."""
GROWTH = 0.02
FILES = 8
"""Pipes of the workers that compile grammars, of which there are now more, now fewer."""
MESSAGES = "/v1/messages"
TOOL = {
    "type": "function",
    "function": {"name": "order", "parameters": {"type": "object", "properties": {"dish": {"type": "string"}}}},
}
SCHEMA = {"type": "object", "properties": {"table": {"type": "integer", "maximum": 99}}, "required": ["table"]}


@dataclass(frozen=True)
class Sort:
    """A sort of request.

    Attributes:
        name: Of its figures.
        path: That it goes to.
        body: Returns the body, given words that are new each time.
        status: That it should be answered with.
        leaves_after_s: Its caller hangs up so long after it has sent it.
    """

    name: str
    path: str
    body: Callable[[str], dict[str, Any]]
    status: int = 200
    leaves_after_s: float | None = None

    def ended_well(self, reply: Reply) -> bool:
        """Whether it was answered as it should be, or its caller left as planned."""
        if self.leaves_after_s is not None:
            return reply.left or reply.status == self.status
        return reply.status == self.status and not (self.status == 200 and reply.code)


def _chat(words: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return {"model": MODEL, "messages": [{"role": "user", "content": words}], "max_tokens": 12, **fields}


SORTS = (
    Sort("chat, streamed", CHAT, lambda words: _chat(words, stream=True)),
    Sort("chat, whole", CHAT, _chat),
    Sort("completion", COMPLETIONS, lambda words: {"model": MODEL, "prompt": words, "max_tokens": 12, "n": 2}),
    Sort("messages, streamed", MESSAGES, lambda words: _chat(words, stream=True)),
    Sort("messages, whole", MESSAGES, _chat),
    Sort("tools of a model that knows none", CHAT, lambda words: _chat(words, tools=[TOOL]), status=400),
    Sort("schema", CHAT, lambda words: _chat(words, structured_outputs={"json": SCHEMA})),
    Sort("log-probabilities", CHAT, lambda words: _chat(words, logprobs=True, top_logprobs=5)),
    Sort("embeddings", EMBEDDINGS, lambda words: {"model": ENCODER, "input": [words] * 4}),
    Sort("a fault of the caller", CHAT, lambda words: _chat(words, temperature=-1), status=400),
    Sort("an unknown model", CHAT, lambda words: _chat(words) | {"model": "unknown"}, status=404),
    Sort("left", CHAT, lambda words: _chat(words, stream=True, max_tokens=200), leaves_after_s=LEAVES_S),
    Sort("tokens", COMPLETIONS, lambda words: {"model": MODEL, "prompt": [*PLAIN_TOKENS], "max_tokens": 12}),
)


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half a minute; growth has no bar")
    parser.add_argument("--minutes", type=float, help=f"how long; {MINUTES:g} unless given")
    arguments = parser.parse_args()
    minutes = arguments.minutes or (QUICK_MINUTES if arguments.quick else MINUTES)
    report = Report("attack_soak", seed=SEED, quick=arguments.quick)
    victim, neighbour, stranger = Key(), Key(), Key(("inference", "metrics"))
    with served(organisations(victim, neighbour, stranger), merged(settings(), SMALL_CACHES)) as server:
        soak = Soak(server, victim.secret, report)
        attackers = AttackerProcess(server.url, stranger.secret, neighbour.secret)
        uvloop.run(soak.run(minutes * 60, attackers))
        report.require("exit code", server.stop(), at_most=0)
    judge(report)
    return report.finish()


class Soak:
    """Traffic and attacks, tenth by tenth.

    Args:
        server: That is asked and attacked.
        key: Of the callers.
        report: Gets the figures.
    """

    def __init__(self, server: ServerProcess, key: str, report: Report) -> None:
        self._server = server
        self._key = key
        self._report = report
        self._client = Client(server.url, patience_s=120)
        self._numbers = itertools.count()
        self._rng = random.Random(SEED)
        self._answers: Counter[str] = Counter()
        self._wrong: Counter[str] = Counter()
        self._attacks: dict[str, Counter[str]] = {attack.name: Counter() for attack in ATTACKS}

    async def run(self, seconds: float, attackers: AttackerProcess) -> None:
        """Plays all tenths."""
        tenths: list[dict[str, Any]] = []
        await until_engines_are_up(self._server)
        async with attackers:
            for number in range(TENTHS):
                await self._tenth(seconds / TENTHS, attackers)
                tenths.append(await self._at_rest())
                print(number + 1, tenths[-1], flush=True)
                self._report.figures = {
                    "answers": dict(sorted(self._answers.items())),
                    "wrong": dict(sorted(self._wrong.items())),
                    "attacks": {name: dict(counts.most_common()) for name, counts in self._attacks.items()},
                    "tenths": tenths,
                }
                self._report.write()

    async def _tenth(self, seconds: float, attackers: AttackerProcess) -> None:
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(self._keep_asking(over))
            for attack in ATTACKS:
                await attackers.begin(attack.name)
                await asyncio.sleep(seconds / len(ATTACKS))
                self._attacks[attack.name].update(await attackers.end())
            over.set()
        self._client.close()

    async def _keep_asking(self, over: asyncio.Event) -> None:
        while not over.is_set():
            number = next(self._numbers)
            sort = SORTS[number % len(SORTS)]
            words = " ".join(self._rng.choices(WORDS, k=self._rng.randint(5, 60)))
            headers = {"anthropic-version": "2023-06-01"} if sort.path == MESSAGES else {}
            call = Call(f"soak-{number}", self._key, sort.body(words), sort.path, sort.leaves_after_s, headers)
            reply = await self._client.ask(call)
            if sort.ended_well(reply):
                self._answers[sort.name] += 1
            else:
                self._wrong[f"{sort.name}: {reply.status} {reply.code} {reply.message}"] += 1
            await asyncio.sleep(PAUSE_S)

    async def _at_rest(self) -> dict[str, Any]:
        """What the server holds when nobody asks."""
        left = await left_behind(self._server)
        samples = await asyncio.to_thread(self._server.metrics)
        gateway = psutil.Process(self._server.process.pid)
        allocated: dict[str, list[float]] = {"gateway": [allocated_mib(gateway.pid)], "engine": [], "grammars": []}
        for child in gateway.children(recursive=True):
            name = "engine" if ENGINE_MODULE in child.cmdline() else "grammars"
            allocated[name].append(allocated_mib(child.pid))
        return {
            "allocated_mib": {name: round(sum(values), 2) for name, values in allocated.items()},
            "tasks": samples["maitred_process_tasks"],
            "files": gateway.num_fds(),
            "left": left,
            "at_s": round(time.monotonic(), 1),
        }


def judge(report: Report) -> None:
    """Holds the figures against the bars."""
    tenths: Sequence[dict[str, Any]] = report.figures["tenths"]
    warm = tenths[min(WARM, len(tenths) - 2) :]
    half = len(warm) // 2
    report.require("answers other than they should be", sum(report.figures["wrong"].values()), at_most=0)
    report.require("left behind", max(sum(tenth["left"].values()) for tenth in tenths), at_most=0)
    report.figures["growth"] = growth = {}
    for name in ("gateway", "engine"):
        first, last = (
            statistics.mean(tenth["allocated_mib"][name] for tenth in part) for part in (warm[:half], warm[half:])
        )
        growth[name] = round(last / first - 1, 5)
        if not report.quick:
            report.require(f"growth of the memory of the {name}", growth[name], at_most=GROWTH)
    report.require("tasks gained", warm[-1]["tasks"] - warm[0]["tasks"], at_most=0)
    report.require("files gained", warm[-1]["files"] - warm[0]["files"], at_most=FILES)


if __name__ == "__main__":
    sys.exit(main())
