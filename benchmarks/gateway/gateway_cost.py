"""What it costs the gateway to know, limit and bill a request: CPU time added, and CPU time per rejected key.

The same chat request of 1 KB goes to several gateways in turns, before a replica that answers at once. One of them is
`maitred serve` with everything on: a key of a team of an organisation, requests and tokens per minute, requests at one
time and a limit on output for the key, a monthly and a total budget for team and organisation, prices, and a ledger
that is written to SQLite in batches. The others lack parts of it, down to a gateway that waves everybody through (see
`benchmarks.support.gateways.bare_gateway`), so that differences between neighbours are what each part costs.

Turns are short, and gateways take them right after each other, so that a machine whose speed changes changes it for
all of them. A gateway's time is read from the end of one of its turns to the end of the next: what it does when its
answers are out, writing its ledger, is in it, and nobody has to wait for that.

What a gateway spends whether or not anybody asks for anything, such as on asking the store for news, is a cost per
second and not per request. It is measured apart, while nothing is sent, taken off, and written down beside the figure.

Microseconds say as much about the hour as about the code, for most of what is added is code and data that the rest of
a request has driven out of the caches: a `write` of 0.7 µs in a loop takes 11 µs there, and three times that
while somebody else wears out the memory. So the share of the request is given too.

Then keys that do not exist are sent over kept connections, and refused.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import uvloop

from benchmarks.support.gateways.bare_gateway import Step
from benchmarks.support.gateways.measured_gateway import MODEL, InstantReplica, MeasuredGateway, gateway, write_config
from benchmarks.support.lean_connections import NUMBER, Answers, distinct, drive, request_of
from benchmarks.support.report import Report
from maitred.identity.keys import make_key
from maitred.wire.address import UnixAddress

CHAT = "/v1/chat/completions"
OUTPUT_TOKENS = 16
BODY_BYTES = 1024
LANES = 8
REJECT_LANES = 32
REJECTS, QUICK_REJECTS = (30_000, 5), (6_000, 2)
"""In a round, and rounds."""
PLENTY = 10**9
KEY_LIMITS = {
    "requests_per_minute": PLENTY,
    "tokens_per_minute": 10**12,
    "concurrent_requests": 10_000,
    "output_tokens": 1_000,
}
BUDGETS = {"usd_per_month": 1e6, "usd_total": 8e6}
ALL = "everything"
NONE = Step.NOTHING.name.lower()
_WARM_UP = 2
"""Rounds."""
STEPS = [*(step.name.lower() for step in Step), ALL]


class Load(NamedTuple):
    """What each gateway gets to do."""

    rounds: int
    """Of all gateways in turn, after those that warm them up."""
    requests: int
    """Of each turn."""
    callers: int
    """Each sends its next request when it has its answer."""


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, help="of all gateways in turn")
    parser.add_argument("--requests", type=int, help="of each turn")
    parser.add_argument("--callers", type=int, default=LANES, help="who each wait for their answer")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="the gateways to compare")
    arguments = parser.parse_args()
    report = Report("gateway_cost", seed=0, quick=arguments.quick)
    rounds = arguments.rounds or (15 if arguments.quick else 100)
    requests = arguments.requests or (100 if arguments.quick else 200)
    with TemporaryDirectory(prefix="maitred-") as folder:
        load = Load(rounds, requests, arguments.callers)
        uvloop.run(_run(Path(folder), arguments.steps, load, report, quick=arguments.quick))
    return report.finish()


async def _run(folder: Path, steps: Sequence[str], load: Load, report: Report, *, quick: bool) -> None:
    key = make_key()
    address = UnixAddress(str(folder / "replica.sock"))
    config = folder / "maitred.yaml"
    team = {"limits": BUDGETS, "keys": {"one": {"secret": {"env": "BENCH_KEY"}, "limits": KEY_LIMITS}}}
    write_config(
        config,
        address,
        admission={"prices": {"*": {"prompt": 0.5, "cached": 0.05, "output": 1.5}}},
        tenants={"acme": {"limits": BUDGETS, "teams": {"kitchen": team}}},
    )
    environment = {"BENCH_KEY": key.plaintext}
    async with InstantReplica(address, tokens=OUTPUT_TOKENS), AsyncExitStack() as stack:
        gateways = {}
        for step in steps:
            bare = ("-m", "benchmarks.support.gateways.bare_gateway", "--step", step)
            started = gateway(config, environment) if step == ALL else gateway(config, environment, bare)
            gateways[step] = await stack.enter_async_context(started)
        await _compare(gateways, request_of(CHAT, _body(), key.plaintext), load, report)
        if ALL in gateways:
            await _reject(gateways[ALL], *(QUICK_REJECTS if quick else REJECTS), report)


async def _compare(gateways: dict[str, MeasuredGateway], request: bytes, load: Load, report: Report) -> None:
    idle = await _idle(gateways, 2.0 if load.rounds < 50 else 5.0)
    report.figures["callers"] = load.callers
    report.figures["idle_cpu_ms_per_s"] = {step: round(1e3 * share, 2) for step, share in idle.items()}
    cost_us: dict[str, list[float]] = {step: [] for step in gateways}
    ended: dict[str, tuple[float, float]] = {}
    for number in range(_WARM_UP + load.rounds):
        for step, served in gateways.items():
            answers = await drive(served.port, itertools.islice(distinct(request), load.requests), lanes=load.callers)
            _expect(answers, 200)
            now_s, cpu_s = time.perf_counter(), served.cpu_s()
            if number >= _WARM_UP:
                since_s, before_s = ended[step]
                spent_s = cpu_s - before_s - idle[step] * (now_s - since_s)
                cost_us[step].append(spent_s / load.requests * 1e6)
            ended[step] = (now_s, cpu_s)
    previous = None
    for step, costs in cost_us.items():
        figures = {"cpu_us": _median(costs)}
        if previous is not None:
            figures["added_us"] = _median(_differences(costs, cost_us[previous]))
        report.figures[step] = figures
        print(f"{step:10} {figures['cpu_us']:8.1f} µs of CPU per request, {figures.get('added_us', 0):+7.1f}")
        previous = step
    if ALL in cost_us and NONE in cost_us:
        added = _differences(cost_us[ALL], cost_us[NONE])
        shares = [this / bare for this, bare in zip(added, cost_us[NONE], strict=True)]
        low, middle, high = statistics.quantiles(added, n=4)
        report.figures["added_us"] = {
            "median": round(middle, 1),
            "lower_quartile": round(low, 1),
            "upper_quartile": round(high, 1),
        }
        report.figures["added_share"] = round(statistics.median(shares), 3)
        print(f"added: {middle:.0f} µs ({low:.0f} to {high:.0f}), {statistics.median(shares):.1%} of a request without")
        report.require("CPU added by identity, limits and ledger, µs", _median(added), at_most=100)


async def _idle(gateways: dict[str, MeasuredGateway], seconds: float) -> dict[str, float]:
    """The part of a core that each takes while nobody asks for anything."""
    before_s = {step: served.cpu_s() for step, served in gateways.items()}
    await asyncio.sleep(seconds)
    return {step: (served.cpu_s() - before_s[step]) / seconds for step, served in gateways.items()}


async def _reject(served: MeasuredGateway, requests: int, rounds: int, report: Report) -> None:
    """Sends keys that do not exist, and keys that are not even that. Without a key one would be served here."""
    unknown = [request_of(CHAT, _body(), make_key().plaintext) for _ in range(1_000)]
    malformed = [request_of(CHAT, _body(), f"sk-mtd-{number}") for number in range(1_000)]
    rates, costs = [], []
    for name, bad in {"unknown key": unknown, "malformed key": malformed}.items():
        per_s, cost_us = [], []
        for _ in range(rounds):
            before_s = served.cpu_s()
            answers = await drive(served.port, itertools.islice(itertools.cycle(bad), requests), lanes=REJECT_LANES)
            _expect(answers, 401)
            cost_us.append((served.cpu_s() - before_s) / requests * 1e6)
            per_s.append(requests / answers.seconds)
        report.figures[name] = {"rejects_per_s": _median(per_s), "cpu_us": _median(cost_us)}
        print(f"{name}: {_median(per_s):,.0f} rejects per second, {_median(cost_us):.1f} µs of CPU each")
        rates.append(_median(per_s))
        costs.append(_median(cost_us))
    report.require("rejects per second on one core", min(rates), at_least=5_000)
    report.require("CPU per reject, µs", max(costs), at_most=200)


def _body() -> bytes:
    """A chat request of 1 KB."""
    request = {"model": MODEL, "max_tokens": OUTPUT_TOKENS, "messages": [{"role": "user", "content": ""}]}
    sentence = "A guest asks for a table by the window, and how long the wait will be. "
    text = NUMBER + sentence * (BODY_BYTES // len(sentence) + 1)
    request["messages"] = [{"role": "user", "content": text[: BODY_BYTES - len(msgspec.json.encode(request))]}]
    return msgspec.json.encode(request)


def _expect(answers: Answers, status: int) -> None:
    if set(answers.statuses) != {status}:
        raise RuntimeError(f"Expected nothing but {status}, got {Counter(answers.statuses)}.")


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 1)


def _differences(these: Sequence[float], those: Sequence[float]) -> list[float]:
    return [round(this - that, 1) for this, that in zip(these, those, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
