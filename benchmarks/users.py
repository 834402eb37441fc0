"""Many users at once over HTTP, on the bundled model: what each of them sees, and that nothing is lost.

Every user streams chat answers in a closed loop, with prompt and answer lengths drawn from a sample of ShareGPT
(divided by eight, since the bundled model's window is 2,048 tokens). The client, the gateway and the engine share this
machine's cores. Every answer is checked: all its tokens, a finish reason, ``[DONE]``. Afterwards the engine must hold
nothing: no running or waiting sequence, every KV block free.
"""

import argparse
import asyncio
import csv
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

from benchmarks.report import RESULTS, Report, percentiles
from benchmarks.stream_client import Answer, stream_chat
from maitred.testing.server_process import ServerProcess, serving

SEED = 20260102
SCALE = 8
MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 1200, 250
TOKENS_PER_WORD = 1.4
WORDS = [
    "the",
    "little",
    "rabbit",
    "went",
    "down",
    "to",
    "the",
    "river",
    "with",
    "a",
    "basket",
    "of",
    "bread",
    "and",
    "said",
    "good",
    "morning",
    "to",
    "every",
    "duck",
    "on",
    "the",
    "water",
]
ARRIVAL_S = 1.0
"""All users arrive within this time."""


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="50 users")
    parser.add_argument("--users", type=int, nargs="+", default=[10, 100, 300, 1000])
    parser.add_argument("--requests", type=int, default=300, help="in all, at least one per user")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of the server")
    arguments = parser.parse_args()
    users = [50] if arguments.quick else arguments.users
    requests = 50 if arguments.quick else arguments.requests
    settings = dict(pair.split("=", 1) for pair in arguments.set)
    report = Report("users", seed=SEED, quick=arguments.quick)
    report.figures["settings"] = settings
    report.figures["by_users"] = {}
    for count in users:
        with serving(settings=settings) as server:
            figures = uvloop.run(run_users(server, count, max(count, requests)))
            report.figures["by_users"][str(count)] = figures
            print(count, figures, flush=True)
            report.require(f"{count} users: complete answers", figures["complete_share"], at_least=1.0)
            report.require(f"{count} users: KV blocks not free at the end", figures["blocks_held_after"], at_most=0)
            code = server.stop()
            report.require(f"{count} users: exit code", code, at_most=0)
    if not arguments.quick:
        plot(report.figures["by_users"], RESULTS / "users.svg")
    return report.finish()


async def run_users(server: ServerProcess, users: int, requests: int) -> dict[str, Any]:
    """Lets the users loose, checks every answer, and returns what they saw."""
    lengths = draw_lengths(requests)
    answers: list[tuple[Answer, int]] = []
    timeout = aiohttp.ClientTimeout(total=900)
    connector = aiohttp.TCPConnector(limit=0)
    memory = MemoryPeaks(server.process.pid)
    shares = [lengths[number::users] for number in range(users)]
    draw = random.Random(SEED)
    start_s = time.perf_counter()
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as group:
        watch = group.create_task(memory.watch())
        tasks = [
            group.create_task(user(session, server.url, share, draw.uniform(0, ARRIVAL_S), answers)) for share in shares
        ]
        await asyncio.gather(*tasks)
        watch.cancel()
    seconds = time.perf_counter() - start_s
    complete = [answer for answer, expected in answers if answer.complete(expected)]
    for answer, expected in answers:
        if not answer.complete(expected):
            print("INCOMPLETE", expected, answer.status, answer.completion_tokens, answer.finish_reason, answer.error)
    samples = server.metrics()
    tokens = sum(answer.completion_tokens for answer in complete)
    return {
        "requests": requests,
        "complete_share": len(complete) / requests,
        "seconds": round(seconds, 2),
        "output_tokens": tokens,
        "output_tokens_per_s": round(tokens / seconds, 1),
        "prompt_tokens_per_s": round(sum(answer.prompt_tokens for answer in complete) / seconds, 1),
        "ttft_s": percentiles([answer.ttft_s for answer in complete]),
        "itl_s": percentiles([gap for answer in complete for gap in answer.gaps_s]),
        "most_at_once": most_at_once(complete),
        "memory_mib": memory.peaks_mib,
        "blocks_held_after": samples["maitred_engine_kv_blocks_total"] - samples["maitred_engine_kv_blocks_free"],
        "sequences_left": samples["maitred_engine_running"] + samples["maitred_engine_waiting"],
        "preemptions": samples["maitred_engine_preemptions_total"],
    }


async def user(
    session: aiohttp.ClientSession,
    url: str,
    share: Sequence[tuple[int, int]],
    arrives_after_s: float,
    answers: list[tuple[Answer, int]],
) -> None:
    """Asks one question after the other."""
    await asyncio.sleep(arrives_after_s)
    for prompt_tokens, output_tokens in share:
        body = {
            "model": "maitred-tiny",
            "messages": [{"role": "user", "content": words(prompt_tokens)}],
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answers.append((await stream_chat(session, url, body), output_tokens))


def draw_lengths(count: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens for each request."""
    with (Path(__file__).parent / "data" / "sharegpt_lengths.csv").open() as file:
        rows = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    draw = random.Random(SEED)
    return [
        (min(max(prompt // SCALE, 8), MAX_PROMPT_TOKENS), min(max(output // SCALE, 2), MAX_OUTPUT_TOKENS))
        for prompt, output in draw.choices(rows, k=count)
    ]


_text = random.Random(SEED)


def words(tokens: int) -> str:
    """Text of about so many tokens, different every time."""
    return " ".join(_text.choices(WORDS, k=max(1, int(tokens / TOKENS_PER_WORD))))


def most_at_once(answers: list[Answer]) -> int:
    """The largest number of requests that were open at the same time."""
    edges = [(answer.sent_s, 1) for answer in answers] + [(answer.arrivals_s[-1], -1) for answer in answers]
    level = most = 0
    for _, change in sorted(edges):
        level += change
        most = max(most, level)
    return most


class MemoryPeaks:
    """Largest resident memory of the gateway and of its engine, and the processor time both have used."""

    def __init__(self, gateway_pid: int) -> None:
        gateway = psutil.Process(gateway_pid)
        self._processes = {"gateway": gateway, "engine": gateway.children()[0]}
        self.peaks_mib = {"gateway": 0.0, "engine": 0.0}

    async def watch(self) -> None:
        """Samples until cancelled."""
        while True:
            for name, process in self._processes.items():
                self.peaks_mib[name] = max(self.peaks_mib[name], round(process.memory_info().rss / 2**20, 1))
            await asyncio.sleep(0.5)


def plot(by_users: dict[str, dict[str, Any]], path: Path) -> None:
    """Time to first token, inter-token latency and throughput over the number of users."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    users = [int(count) for count in by_users]
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6))
    for axis, key, title in (
        (axes[0], "ttft_s", "time to first token, s"),
        (axes[1], "itl_s", "inter-token latency, s"),
    ):
        for rank in ("p50", "p95", "p99"):
            axis.plot(users, [by_users[str(count)][key][rank] for count in users], marker="o", label=rank)
        axis.set_title(title)
        axis.legend()
    axes[2].plot(users, [by_users[str(count)]["output_tokens_per_s"] for count in users], marker="o")
    axes[2].set_title("output tokens per second")
    for axis in axes:
        axis.set_xscale("log")
        axis.set_xticks(users, [str(count) for count in users])
        axis.set_xlabel("users")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
