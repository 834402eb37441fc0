"""Many users at once over HTTP, on the bundled model: what each of them sees, and that nothing is lost.

`maitred.load` plays them: every user streams chat answers in a closed loop, with prompt and answer lengths drawn from a
sample of ShareGPT (divided by eight, since the bundled model's window is 2,048 tokens). The tester, the gateway and the
engine share this machine's cores. Every answer is checked: all its tokens, a finish reason, ``[DONE]``. Afterwards the
engine must hold nothing: no running or waiting sequence, every KV block free.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.support.report import RESULTS, Report, percentiles
from maitred.load.measure.cost import judge
from maitred.load.measure.record import RequestRecord, RunData, UserOutcome
from maitred.load.play.driver import run
from maitred.load.spec import ArrivalsSpec, ClientsSpec, LoadSpec, LoadTarget, ShapeSpec, StopCondition
from maitred.testing.server_process import ServerProcess, serving

SEED = 20260102
LENGTHS = Path(__file__).parents[1] / "data" / "sharegpt_lengths.csv"
SHAPE = ShapeSpec(lengths=str(LENGTHS), scale=1 / 8, max_prompt_tokens=1200, max_output_tokens=250)
TIMEOUT_S = 900.0
QUICK_USERS = 50


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_USERS} users")
    parser.add_argument("--users", type=int, nargs="+", default=[10, 100, 300, 1000])
    parser.add_argument("--requests", type=int, default=300, help="in all, at least one per user")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of the server")
    arguments = parser.parse_args()
    users = [QUICK_USERS] if arguments.quick else arguments.users
    requests = QUICK_USERS if arguments.quick else arguments.requests
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
    spec = LoadSpec(
        target=LoadTarget(url=server.url, exact_output="always"),
        arrivals=ArrivalsSpec(users=users),
        shape=SHAPE,
        clients=ClientsSpec(retries=0, timeout_s=TIMEOUT_S),
        bounds=StopCondition(requests=requests, drain_s=TIMEOUT_S),
        seed=SEED,
    )
    memory = MemoryPeaks(server.process.pid)
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(memory.watch())
        data = await run(spec)
        watch.cancel()
    complete = [record for record in data.records if is_whole(record)]
    for record in data.records:
        if not is_whole(record):
            print("INCOMPLETE", record)
    samples = await asyncio.to_thread(server.metrics)
    tokens = sum(record.output_tokens for record in complete)
    return {
        "requests": requests,
        "complete_share": len(complete) / requests,
        "seconds": round(data.seconds, 2),
        "output_tokens": tokens,
        "output_tokens_per_s": round(tokens / data.seconds, 1),
        "prompt_tokens_per_s": round(sum(record.prompt_tokens for record in complete) / data.seconds, 1),
        "ttft_s": percentiles([record.arrivals_s[0] - record.intended_s for record in complete]),
        "itl_s": percentiles([gap for record in complete for gap in gaps_s(record)]),
        "most_at_once": most_at_once(data),
        "memory_mib": memory.peaks_mib,
        "blocks_held_after": samples["maitred_engine_kv_blocks_total"] - samples["maitred_engine_kv_blocks_free"],
        "sequences_left": samples["maitred_engine_running"] + samples["maitred_engine_waiting"],
        "preemptions": samples["maitred_engine_preemptions_total"],
        "tester": judge(data).verdict,
    }


def is_whole(record: RequestRecord) -> bool:
    """Whether every token that was asked for came, and the server marked the end."""
    return (
        record.outcome is UserOutcome.COMPLETE
        and record.finish_reason == "length"
        and record.output_tokens == record.asked_tokens
    )


def gaps_s(record: RequestRecord) -> list[float]:
    """Times between two pieces of an answer's text."""
    return [later - earlier for earlier, later in zip(record.arrivals_s, record.arrivals_s[1:], strict=False)]


def most_at_once(data: RunData) -> int:
    """The largest number of requests that were open at the same time."""
    edges = [(record.sent_s, 1) for record in data.records] + [(record.ended_s, -1) for record in data.records]
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
