"""What a second copy of late requests does to the slowest first tokens, and how many copies it takes.

    users -> gateway that hedges     -> two scripted servers, of which each is silent for a while now and then
    users -> gateway that does not   -> two more of the same

Both sides are played at the same time by as many users, so that whatever the machine does, it does to both. Each server
is slow to begin with one answer in thirty, by `PAUSE_S`; the others take about `TTFT_S`. What the servers were asked
beyond the answers that users got is what was sent twice.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.support.report import Report, percentiles
from maitred.testing.scripted_openai import (
    DelayDistribution,
    FaultKind,
    ScriptedFault,
    ScriptedOpenAI,
    ServerScript,
    scripted_openai,
)
from maitred.testing.server_process import ServerProcess, serving

SEED = 7
MODEL = "far"
USERS = 4
TTFT_S, PAUSE_S, PAUSED_SHARE = 0.06, 0.6, 1 / 30
OUTPUT_TOKENS = 8
SHARE = 0.05
SECONDS, QUICK_SECONDS = 45.0, 10.0
WARM_S = 3.0
"""Before that, a gateway does not know what is late."""


@dataclass
class Side:
    """One gateway with its servers, and what its users saw."""

    gateway: ServerProcess
    servers: list[ScriptedOpenAI]
    ttft_s: list[float] = field(default_factory=list)
    answers: int = 0
    second: int = 0

    def figures(self, calls: int) -> dict[str, Any]:
        """For the report."""
        return {
            "answers": self.answers,
            "calls_of_servers": calls,
            "extra_calls_share": round(calls / self.answers - 1, 4),
            "answered_by_second": self.second,
            "ttft_s": percentiles(self.ttft_s),
        }


def main() -> int:
    """Runs the benchmark; the exit code says whether the tail is shorter within the budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS:g} seconds")
    arguments = parser.parse_args()
    report = Report("hedging", seed=SEED, quick=arguments.quick)
    with ExitStack() as running:
        off, on = (running.enter_context(_side(hedges=hedges)) for hedges in (False, True))
        uvloop.run(_play([off, on], QUICK_SECONDS if arguments.quick else SECONDS))
        # The gateways are idle: what the servers were asked by now is all there is.
        figures = {
            name: side.figures(sum(len(server.stop().requests) for server in side.servers))
            for name, side in (("off", off), ("on", on))
        }
    report.figures = {"users": USERS, "paused_share": PAUSED_SHARE, "pause_s": PAUSE_S, "sides": figures}
    ratio = {p: figures["on"]["ttft_s"][p] / figures["off"]["ttft_s"][p] for p in ("p50", "p95", "p99")}
    report.figures["on_over_off"] = {p: round(value, 3) for p, value in ratio.items()}
    report.require("p99 of the time to first token, over that without", ratio["p99"], at_most=0.6)
    report.require("p50, the same", ratio["p50"], at_most=1.15)
    report.require("extra calls per answer", figures["on"]["extra_calls_share"], at_most=SHARE)
    report.require("extra calls per answer without", figures["off"]["extra_calls_share"], at_most=0.0)
    return report.finish()


@contextmanager
def _side(*, hedges: bool) -> Iterator[Side]:
    fault = ScriptedFault(kind=FaultKind.STALL, after=0, for_s=PAUSE_S, share=PAUSED_SHARE)
    with ExitStack() as running:
        servers = [
            running.enter_context(
                scripted_openai(
                    ServerScript(
                        ttft=DelayDistribution(mean_s=TTFT_S, cv=0.2),
                        itl=DelayDistribution(mean_s=0.005),
                        faults=[fault],
                        seed=SEED + number,
                    )
                )
            )
            for number in range(2)
        ]
        upstreams = [
            {"url": f"{server.url}/v1", "dialect": "sglang", "name": f"s{n}"} for n, server in enumerate(servers)
        ]
        config = {
            "log": {"level": "warning"},
            "server": {"allow_unauthenticated": True},
            "models": {MODEL: {"upstreams": upstreams}},
            "dispatch": {"hedging": {"models": [MODEL] if hedges else [], "share": SHARE}},
        }
        path = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="maitred-"))) / "maitred.yaml"
        path.write_text(json.dumps(config))
        yield Side(running.enter_context(serving("--config", str(path))), servers)


async def _play(sides: list[Side], seconds: float) -> None:
    begun_s = time.monotonic()
    async with asyncio.TaskGroup() as users:
        for side in sides:
            for _ in range(USERS):
                users.create_task(_user(side, begun_s + WARM_S, begun_s + WARM_S + seconds))


async def _user(side: Side, from_s: float, to_s: float) -> None:
    """Asks again and again; what it sees before `from_s` is not noted."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "one"}],
        "max_tokens": OUTPUT_TOKENS,
        "stream": True,
    }
    headers = {"x-maitred-priority": "interactive"}
    async with httpx.AsyncClient(base_url=side.gateway.url, timeout=30) as client:
        while (asked_s := time.monotonic()) < to_s or not side.ttft_s:
            async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                response.raise_for_status()
                lines = response.aiter_lines()
                await anext(lines)
                ttft_s = time.monotonic() - asked_s
                last = [line async for line in lines if line][-1]
            assert last == "data: [DONE]", last
            side.answers += 1
            if asked_s >= from_s:
                side.ttft_s.append(ttft_s)
                side.second += response.headers.get("x-maitred-hedged") == "second"


if __name__ == "__main__":
    sys.exit(main())
