"""What traces cost the gateway: CPU time per request with nothing traced, one request in a hundred, and every one.

The same chat request goes in turns to gateways that differ in one setting, before a replica that answers at once, so
that a machine whose speed changes changes it for all of them; figures are ratios within each round. The CPU time is
that of the whole process, so it includes the thread that packs spans and sends them to a collector, which counts them.
It is read from the end of one of a gateway's turns to the end of the next, since spans leave once a second; what it
spends while nobody asks is in all figures alike.

`off` remembers nothing (`explain.requests: 0`) and traces nothing; `explain` is the default. A replica that answers at
once makes the ratios as large as they can be: a request that computes for a second costs the gateway the same.

    python -m benchmarks tracing [--quick]
"""

import argparse
import asyncio
import itertools
import statistics
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import uvloop
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.support.gateways.measured_gateway import MODEL, InstantReplica, MeasuredGateway, gateway, write_config
from benchmarks.support.lean_connections import NUMBER, distinct, drive, request_of
from benchmarks.support.report import Report
from maitred.wire.address import UnixAddress

CHAT = "/v1/chat/completions"
OUTPUT_TOKENS = 16
LANES = 8
ROUNDS, QUICK_ROUNDS = (40, 300), (6, 150)
"""How many, and the requests of each gateway in each."""
WARM_UP = 2
"""Rounds."""
SPANS = 8
"""Of a request: itself and seven stages. A replica that answers at once reports no prefill and no decode."""
LEAVE_S = 2.0
"""For the last spans."""
BASE = "off"
MOST_AT_1_PERCENT = 1.05
MOST_AT_100_PERCENT = 1.6


class Collector:
    """Counts spans.

    Attributes:
        spans: That have come.
    """

    def __init__(self) -> None:
        self.spans = 0

    async def take(self, request: web.Request) -> web.Response:
        """An export; the server has unpacked it."""
        for resource in ExportTraceServiceRequest.FromString(await request.read()).resource_spans:
            self.spans += sum(len(scope.spans) for scope in resource.scope_spans)
        return web.Response()


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    report = Report("tracing", seed=0, quick=arguments.quick)
    rounds, requests = QUICK_ROUNDS if arguments.quick else ROUNDS
    with TemporaryDirectory(prefix="maitred-") as folder:
        uvloop.run(_run(Path(folder), rounds, requests, report))
    return report.finish()


def settings_of(endpoint: str) -> dict[str, dict[str, Any]]:
    """Gateway -> the sections in which it differs."""
    return {
        BASE: {"explain": {"requests": 0}},
        "explain": {},
        "traced 0 %": {"traces": {"endpoint": endpoint, "ratio": 0}},
        "traced 1 %": {"traces": {"endpoint": endpoint, "ratio": 0.01}},
        "traced 100 %": {"traces": {"endpoint": endpoint, "ratio": 1}},
    }


async def _run(folder: Path, rounds: int, requests: int, report: Report) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": NUMBER + "x" * 900}], "max_tokens": OUTPUT_TOKENS}
    request = request_of(CHAT, msgspec.json.encode(body))
    address = UnixAddress(str(folder / "replica.sock"))
    async with (
        InstantReplica(address, tokens=OUTPUT_TOKENS),
        _collector() as (collector, endpoint),
        AsyncExitStack() as stack,
    ):
        gateways: dict[str, MeasuredGateway] = {}
        for name, sections in settings_of(endpoint).items():
            config = folder / f"{len(gateways)}.yaml"
            write_config(config, address, **sections)
            gateways[name] = await stack.enter_async_context(gateway(config, {}))
        costs: dict[str, list[float]] = {name: [] for name in gateways}
        ended_s: dict[str, float] = {}
        for number in range(WARM_UP + rounds):
            for name, served in gateways.items():
                cpu_s = await _turn(served, request, requests)
                if number >= WARM_UP:
                    costs[name].append((cpu_s - ended_s[name]) / requests * 1e6)
                ended_s[name] = cpu_s
        await asyncio.sleep(LEAVE_S)
    for name, mine in costs.items():
        ratios = [cost / base for cost, base in zip(mine, costs[BASE], strict=True)]
        figures = {
            "cpu_us": round(statistics.median(mine), 1),
            "ratio": round(statistics.median(ratios), 4),
            "added_us": round(statistics.median(c - b for c, b in zip(mine, costs[BASE], strict=True)), 1),
        }
        report.figures[name] = figures
        print(f"{name:13} {figures['cpu_us']:8.1f} µs of CPU per request, {figures['ratio']:6.3f} of {BASE}")
    report.figures["requests"] = rounds * requests
    report.figures["spans"] = collector.spans
    report.require("CPU at 1 %, of off", report.figures["traced 1 %"]["ratio"], at_most=MOST_AT_1_PERCENT)
    report.require("CPU at 100 %, of off", report.figures["traced 100 %"]["ratio"], at_most=MOST_AT_100_PERCENT)
    sent = SPANS * (WARM_UP + rounds) * requests
    report.require("spans received, of those of 100 %", collector.spans / sent, at_least=1.0)


async def _turn(served: MeasuredGateway, request: bytes, requests: int) -> float:
    """So many requests; the CPU seconds of the gateway up to then."""
    answers = await drive(served.port, itertools.islice(distinct(request), requests), lanes=LANES)
    if set(answers.statuses) != {200}:
        raise RuntimeError(f"A gateway answered {answers.statuses}.")
    return served.cpu_s()


@asynccontextmanager
async def _collector() -> AsyncIterator[tuple[Collector, str]]:
    collector = Collector()
    application = web.Application(client_max_size=64 << 20)
    application.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield collector, f"http://127.0.0.1:{port}/v1/traces"
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    raise SystemExit(main())
