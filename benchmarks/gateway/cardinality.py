"""How much a scrape shows when ten thousand tenants use a gateway, and callers make up whatever they like.

A real gateway with the bundled model serves organisations that each have a key of their own. Every one of them sends a
chat, and something wrong in words of its own: a model, a path, an id, a tier or a key that is not known. First come
a few, twice as many as have series of their own, then all others, while `/metrics` is read several times a second, in
turns in both formats.

Every scrape is read by the parsers of Prometheus' client and held against the one before: no counter may fall. What
the tenants beyond the first few add to it is what a caller could make it grow by.

    python -m benchmarks cardinality [--quick]
"""

import argparse
import asyncio
import itertools
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import msgspec
import uvloop
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from benchmarks.support.gateways.measured_gateway import MeasuredGateway, gateway
from benchmarks.support.lean_connections import Answers, drive, request_of
from benchmarks.support.report import Report, percentiles
from maitred.core.clock import SystemClock
from maitred.core.tenancy import ApiKey, Scope, Tenant
from maitred.identity.keys import make_key
from maitred.observe.config import MetricsConfig
from maitred.store.config import StoreConfig
from maitred.store.database import open_database
from maitred.store.directory import DirectoryStore
from maitred.testing.prometheus_server import promtool

CHAT = "/v1/chat/completions"
MODEL = "chat"
OUTPUT_TOKENS = 2
TENANTS, QUICK_TENANTS = 10_000, 1_000
LANES = 16
EVERY_S = 0.3
"""Between two scrapes."""
NAMED = MetricsConfig().tenants
MOST_SERIES = 2_000
MOST_ADDED = 10
"""Of all tenants beyond the first: a cause or an error that happens to be seen later than the others."""
MOST_SCRAPE_MS = 500.0
"""While the gateway has more requests than it can serve. Prometheus waits ten seconds."""
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
_PROMTOOL_ADVICE = 3
"""Its exit code when all could be read, and it would have named something otherwise."""
READERS: dict[str, Callable[[str], Iterable[Metric]]] = {"": read_text, OPENMETRICS: read_openmetrics}
"""What a scraper accepts -> what reads it then."""


@dataclass(frozen=True)
class Scrape:
    """One answer of `/metrics`."""

    accept: str
    text: str
    took_s: float

    @property
    def series(self) -> int:
        """Lines that are no comments."""
        return sum(1 for line in self.text.splitlines() if line and not line.startswith("#"))

    @property
    def size(self) -> dict[str, float]:
        """For the result file."""
        return {"series": self.series, "kb": round(len(self.text) / 1000, 1)}


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the tenants")
    arguments = parser.parse_args()
    checker = promtool()
    report = Report("cardinality", seed=0, quick=arguments.quick)
    with TemporaryDirectory(prefix="maitred-") as folder:
        uvloop.run(_run(Path(folder), QUICK_TENANTS if arguments.quick else TENANTS, checker, report))
    print(json.dumps(report.figures, indent=1))
    return report.finish()


async def _run(folder: Path, count: int, checker: str, report: Report) -> None:
    keys, scraper = await _tenants(folder / "data", count)
    config = folder / "maitred.yaml"
    config.write_text(json.dumps({"log": {"level": "warning"}, "model": {"served_name": MODEL}}))
    few = 2 * NAMED
    async with gateway(config, {"MAITRED__STORE__FOLDER": str(folder / "data")}) as served:
        metrics = Metrics(served, scraper)
        async with aiohttp.ClientSession() as session:
            before = await metrics.read(session, "")
            first = [await drive(served.port, requests, lanes=LANES) for requests in _requests(0, keys[:few])]
            of_few = await metrics.read(session, "")
            scrapes: list[Scrape] = []
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(metrics.watch(session, scrapes))
                rest = [await drive(served.port, requests, lanes=LANES) for requests in _requests(few, keys[few:])]
                watching.cancel()
            after = await metrics.read(session, "")
    report.figures["tenants"] = count
    report.figures["scrape"] = {"before": before.size, f"{few} tenants": of_few.size, "all tenants": after.size}
    report.figures["answers"] = {"chats": _findings(first[0], rest[0]), "wrong": _findings(first[1], rest[1])}
    report.figures["chats_per_s"] = round(sum(rest[0].statuses.values()) / rest[0].seconds, 1)
    loaded = percentiles([scrape.took_s for scrape in scrapes])
    report.figures["scrapes"] = {"number": len(scrapes), **{p: round(s * 1e3, 1) for p, s in loaded.items()}}
    readable, report.figures["promtool"] = _linted(checker, after.text)
    report.require("read by promtool", int(readable), at_least=1)
    _judge(report, count, of_few, after, scrapes)
    report.require("scrape under load p99, ms", round(loaded.get("p99", math.inf) * 1e3, 1), at_most=MOST_SCRAPE_MS)


def _judge(report: Report, count: int, of_few: Scrape, after: Scrape, scrapes: Sequence[Scrape]) -> None:
    refused, fallen = 0, set[str]()
    counted: dict[str, dict[str, float]] = {accept: {} for accept in READERS}
    for scrape in [*scrapes, after]:
        try:
            now = counters_of(READERS[scrape.accept](scrape.text))
        except ValueError as error:
            print(f"A parser refused a scrape: {error}")
            refused += 1
            continue
        earlier, counted[scrape.accept] = counted[scrape.accept], now
        fallen |= {name for name, value in earlier.items() if now.get(name, 0.0) < value}
    tenants = {name: value for name, value in counted[""].items() if name.startswith("maitred_tenant_requests_total")}
    for name in fallen:
        print(f"A counter fell: {name}")
    report.require("series, all tenants", after.series, at_most=MOST_SERIES)
    report.require("series added by those beyond the first", after.series - of_few.series, at_most=MOST_ADDED)
    report.require("chats that are not counted", count - sum(tenants.values()), at_most=0)
    report.require("scrapes that a parser refused", refused, at_most=0)
    report.require("counters that fell", len(fallen), at_most=0)


class Metrics:
    """Reads the metrics of a gateway.

    Args:
        served: The gateway.
        key: Lets read them.
    """

    def __init__(self, served: MeasuredGateway, key: str) -> None:
        self._url = f"{served.url}/metrics"
        self._key = key

    async def read(self, session: aiohttp.ClientSession, accept: str) -> Scrape:
        """Once, in the format that is accepted."""
        started_s = time.perf_counter()
        headers = {"Authorization": f"Bearer {self._key}", "Accept": accept}
        async with session.get(self._url, headers=headers) as response:
            response.raise_for_status()
            text = await response.text()
        return Scrape(accept, text, time.perf_counter() - started_s)

    async def watch(self, session: aiohttp.ClientSession, scrapes: list[Scrape]) -> None:
        """Again and again, in turns in each format."""
        for accept in itertools.cycle(READERS):
            scrapes.append(await self.read(session, accept))
            await asyncio.sleep(EVERY_S)


def counters_of(families: Iterable[Metric]) -> dict[str, float]:
    """Every series that may only grow, by its name and labels."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in families
        if family.type in ("counter", "histogram", "summary")
        for sample in family.samples
    }


async def _tenants(store: Path, count: int) -> tuple[list[str], str]:
    """Organisations with a key each; the keys, and one that may read metrics."""
    made = [make_key() for _ in range(count + 1)]
    tenants = [Tenant(id=f"org-{number:05}") for number in range(count)]
    keys = [
        ApiKey(id=key.public_id, tenant=tenant.id, secrets=(key.secret,))
        for key, tenant in zip(made, tenants, strict=False)
    ]
    scraper = ApiKey(id=made[-1].public_id, tenant=tenants[0].id, secrets=(made[-1].secret,), scopes=(Scope.METRICS,))
    async with open_database(StoreConfig(folder=str(store))) as database:
        await DirectoryStore(database, SystemClock()).add_many(tenants, [*keys, scraper])
    return [key.plaintext for key in made[:-1]], made[-1].plaintext


def _requests(start: int, keys: Sequence[str]) -> tuple[Iterator[bytes], Iterator[bytes]]:
    """A chat of each tenant, and something wrong of each."""
    return (
        (_chat(key, number) for number, key in enumerate(keys, start)),
        (_wrong(key, number) for number, key in enumerate(keys, start)),
    )


def _chat(key: str, number: int, **fields: object) -> bytes:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"A table for {number}?"}],
        "max_tokens": OUTPUT_TOKENS,
        "user": f"guest-{number}",
        **fields,
    }
    return request_of(CHAT, msgspec.json.encode(body), key)


def _wrong(key: str, number: int) -> bytes:
    """What a caller may get wrong in words of its own."""
    made_up = f"made-up-{number}"
    wrongs = (
        _chat(key, number, model=made_up),
        _chat(key, number, service_tier=made_up, max_tokens=-number),
        _chat(f"{key}{number}", number),
        request_of(f"/v1/{made_up}", b"{}", key),
        request_of(CHAT, b"{}", key).replace(b"POST", b"PUT", 1),
        request_of(CHAT, b"{}", key).replace(b"user-agent: lanes", f"x-request-id: {made_up}".encode(), 1),
    )
    return wrongs[number % len(wrongs)]


def _findings(*parts: Answers) -> dict[str, int]:
    """Status -> how many."""
    statuses = sum((part.statuses for part in parts), start=type(parts[0].statuses)())
    return {str(status): statuses[status] for status in sorted(statuses)}


def _linted(checker: str, text: str) -> tuple[bool, list[str]]:
    """Whether `promtool` can read it, and what it says of our names; vLLM's are not ours to choose."""
    done = subprocess.run([checker, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    findings = {line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("vllm:")}
    return done.returncode in (0, _PROMTOOL_ADVICE), sorted(findings)


if __name__ == "__main__":
    raise SystemExit(main())
