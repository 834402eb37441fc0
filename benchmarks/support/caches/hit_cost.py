"""What a hit, a miss and a cache that is off cost a gateway in CPU time, and how long a hit takes.

As in `benchmarks.gateway.gateway_cost`, gateways with everything on take short turns right after each other, before a
replica that answers at once. Each gets only one kind of request, so that what it does when its answers are out, such as
writing its ledger, is counted where it belongs; what it spends while nobody asks is taken off.

The time of a hit in the process is what its line in the ledger says: from reading the request to the record of its
usage, which comes before the last byte is written. It is taken from turns with one caller, like that over loopback.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from operator import sub, truediv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from benchmarks.gateway.gateway_cost import BUDGETS, KEY_LIMITS
from benchmarks.support.connection_rounds import Turn, take
from benchmarks.support.gateways.measured_gateway import MODEL, InstantReplica, MeasuredGateway, gateway, write_config
from benchmarks.support.lean_connections import NUMBER, distinct, request_of
from benchmarks.support.ledger_audit import read_ledger
from benchmarks.support.report import Report, percentiles
from maitred.config.tree import BUNDLED_MODEL
from maitred.engine.models.digest import content_digest, fingerprint_of
from maitred.identity.keys import make_key
from maitred.store.config import StoreConfig
from maitred.testing.redis_server import redis_server
from maitred.testing.script import SCRIPTED_CARD
from maitred.wire.address import UnixAddress

CHAT, NOTHING = "/v1/chat/completions", "/v1/nothing"
BODY_BYTES, OUTPUT_TOKENS = 1024, 16
LANES = 8
BEFORE, OFF, MISS, ABSENT = "before", "off", "miss", "404"
HIT, HIT_STREAM, HIT_REDIS = "hit", "hit, stream", "hit, Redis"
_WARM_UP = 2
"""Rounds."""


@dataclass(frozen=True)
class CostScale:
    """How much of everything.

    Attributes:
        starts: Of all gateways; processes of one program differ, too.
        rounds: Of all gateways in turn, in each start.
        requests: Of each turn.
        latencies: Requests of one caller, for times.
        idle_s: For what gateways do while nobody asks.
    """

    starts: int = 3
    rounds: int = 40
    requests: int = 200
    latencies: int = 2_000
    idle_s: float = 4.0


class _Costs:
    """CPU times of all turns, by gateway, and times of hits."""

    def __init__(self) -> None:
        self.cpu_us: dict[str, list[float]] = {}
        self.latencies_s: dict[str, list[float]] = {}
        self.inside_s: dict[str, list[float]] = {}


async def measure(scale: CostScale, before: Path | None, report: Report) -> None:
    """Runs this part, and holds its bars.

    Args:
        scale: How much of everything.
        before: Another checkout of the project, whose gateway takes turns; None: there is none.
        report: Gets figures and bars.
    """
    costs = _Costs()
    for _ in range(scale.starts):
        with redis_server() as redis, TemporaryDirectory(prefix="maitred-", dir="/tmp") as folder:
            await _measure_once(scale, before, Path(folder), redis.url.reveal(), costs)
    cpu_us = costs.cpu_us
    report.figures["cost"] = {
        name: {
            "cpu_us": round(statistics.median(values), 1),
            "quartiles_us": [round(value, 1) for value in statistics.quantiles(values, n=4)[::2]],
        }
        for name, values in cpu_us.items()
    }
    report.figures["latency_ms"] = {
        name: {rank: round(1e3 * value, 3) for rank, value in percentiles(values).items()}
        for name, values in costs.latencies_s.items()
    }
    report.figures["latency_in_process_ms"] = {
        name: {rank: round(1e3 * value, 3) for rank, value in percentiles(values).items()}
        for name, values in costs.inside_s.items()
    }
    for name in (HIT, HIT_STREAM, HIT_REDIS):
        added = _paired(cpu_us[name], cpu_us[ABSENT], sub)
        report.require(f"{name}: CPU over a 404, µs", round(added, 1), at_most=500)
        report.figures["cost"][name]["of_a_miss"] = round(_paired(cpu_us[name], cpu_us[MISS], truediv), 3)
    inside = report.figures["latency_in_process_ms"]
    report.require("hit: p50 in the process, ms", inside[HIT]["p50"], at_most=1.0)
    report.require("hit, Redis: p50 in the process, ms", inside[HIT_REDIS]["p50"], at_most=2.0)
    miss_share = _paired(cpu_us[MISS], cpu_us[OFF], truediv)
    report.figures["cost"][MISS]["of_off"] = round(miss_share, 3)
    if before is not None:
        report.require("off: CPU of the gateway before", _paired(cpu_us[OFF], cpu_us[BEFORE], truediv), at_most=1.02)
        report.require("miss: CPU of the gateway before", _paired(cpu_us[MISS], cpu_us[BEFORE], truediv), at_most=1.05)
    for part in ("cost", "latency_ms", "latency_in_process_ms"):
        for name, figures in report.figures[part].items():
            print(f"{part:22} {name:12} {figures}", flush=True)


async def _measure_once(scale: CostScale, before: Path | None, folder: Path, redis_url: str, costs: _Costs) -> None:
    address, key = UnixAddress(str(folder / "replica.sock")), make_key().plaintext
    environment = {"BENCH_KEY": key, "BENCH_REDIS_URL": redis_url}
    requests, folders = _requests(key), dict[str, Path]()
    async with _FingerprintedReplica(address), AsyncExitStack() as stack:
        starting = []
        for number, name in enumerate(name for name in requests if name != BEFORE or before):
            config = folder / f"{number}.yaml"
            _write_config(config, address, name)
            own = {"MAITRED__STORE__FOLDER": str(folder / str(number))}
            if name == BEFORE:
                own["PYTHONPATH"] = f"{before}/src"
            folders[name] = folder / str(number)
            starting.append(stack.enter_async_context(gateway(config, {**environment, **own})))
        gateways = dict(zip(folders, await asyncio.gather(*starting), strict=True))
        idle = await _idle(gateways, scale.idle_s)
        await _take_turns(gateways, requests, idle, scale, costs.cpu_us)
        for name in (ABSENT, HIT, HIT_STREAM, HIT_REDIS):
            since_s = time.time()
            turn = await _turn(gateways[name], requests[name], scale.latencies, lanes=1)
            costs.latencies_s.setdefault(name, []).extend(turn.latencies_s)
            if name == ABSENT:
                continue
            await asyncio.sleep(2.0)  # lines reach the database within half a second
            lines = [
                line for line in await read_ledger(StoreConfig(folder=str(folders[name]))) if line.time_s > since_s
            ]
            if any(line.cache != "exact" for line in lines):
                raise RuntimeError(f"{name}: not all were hits.")
            costs.inside_s.setdefault(name, []).extend(line.duration_s for line in lines)


async def _take_turns(
    gateways: Mapping[str, MeasuredGateway],
    requests: Mapping[str, Iterator[bytes]],
    idle: Mapping[str, float],
    scale: CostScale,
    cpu_us: dict[str, list[float]],
) -> None:
    ended: dict[str, tuple[float, float]] = {}
    for number in range(_WARM_UP + scale.rounds):
        for name, served in gateways.items():
            await _turn(served, requests[name], scale.requests, lanes=LANES)
            now_s, cpu_s = time.perf_counter(), served.cpu_s()
            if number >= _WARM_UP:
                since_s, before_s = ended[name]
                spent_s = cpu_s - before_s - idle[name] * (now_s - since_s)
                cpu_us.setdefault(name, []).append(spent_s / scale.requests * 1e6)
            ended[name] = (now_s, cpu_s)


async def _turn(served: MeasuredGateway, requests: Iterator[bytes], count: int, *, lanes: int) -> Turn:
    turn = await take(served.port, itertools.islice(requests, count), lanes=lanes)
    if len(turn.statuses) != 1 or not {200, 404}.issuperset(turn.statuses):
        raise RuntimeError(f"Expected nothing but one status, got {turn.statuses}.")
    return turn


async def _idle(gateways: Mapping[str, MeasuredGateway], seconds: float) -> dict[str, float]:
    """The part of a core that each takes while nobody asks for anything."""
    before_s = {name: served.cpu_s() for name, served in gateways.items()}
    await asyncio.sleep(seconds)
    return {name: (served.cpu_s() - before_s[name]) / seconds for name, served in gateways.items()}


class _FingerprintedReplica(InstantReplica):
    """Replica that says it runs the bundled model, because answers of what is not known are not kept."""

    def __init__(self, address: UnixAddress) -> None:
        super().__init__(address, tokens=OUTPUT_TOKENS)
        digest = msgspec.structs.replace(fingerprint_of(BUNDLED_MODEL), content=content_digest(BUNDLED_MODEL))
        self.card = msgspec.structs.replace(SCRIPTED_CARD, digest=digest)


def _requests(key: str) -> dict[str, Iterator[bytes]]:
    """Requests without end, by gateway: a text that nobody has sent before, or always the same."""
    fresh, same = distinct(request_of(CHAT, _body(), key)), request_of(CHAT, _body(), key)
    return {
        BEFORE: fresh,
        OFF: fresh,
        MISS: fresh,
        ABSENT: itertools.repeat(request_of(NOTHING, _body(), key)),
        HIT: itertools.repeat(same),
        HIT_STREAM: itertools.repeat(request_of(CHAT, _body(stream=True), key)),
        HIT_REDIS: itertools.repeat(same),
    }


def _body(**more: object) -> bytes:
    """A chat request of 1 KB."""
    request: dict[str, Any] = {"model": MODEL, "max_tokens": OUTPUT_TOKENS, "temperature": 0, **more}
    sentence = "A guest asks for a table by the window, and how long the wait will be. "
    text = NUMBER + sentence * (BODY_BYTES // len(sentence) + 1)
    left = BODY_BYTES - len(msgspec.json.encode({**request, "messages": [{"role": "user", "content": ""}]}))
    return msgspec.json.encode({**request, "messages": [{"role": "user", "content": text[:left]}]})


def _write_config(path: Path, replica: UnixAddress, name: str) -> None:
    team = {"limits": BUDGETS, "keys": {"one": {"secret": {"env": "BENCH_KEY"}, "limits": KEY_LIMITS}}}
    sections: dict[str, Any] = {
        "admission": {"prices": {"*": {"prompt": 0.5, "cached": 0.05, "output": 1.5}}},
        "tenants": {"acme": {"limits": BUDGETS, "teams": {"kitchen": team}}},
    }
    if name == OFF:
        sections["cache"] = {"mode": "off"}
    if name == HIT_REDIS:
        # A machine that others use, too, may take longer than that for an answer, which would be a miss.
        sections["cache"] = {"url": {"env": "BENCH_REDIS_URL"}, "answer_timeout_s": 10.0}
    write_config(path, replica, **sections)


def _paired(these: list[float], those: list[float], combine: Callable[[float, float], float]) -> float:
    """Median over turns of the same round."""
    return statistics.median([combine(one, other) for one, other in zip(these, those, strict=True)])
