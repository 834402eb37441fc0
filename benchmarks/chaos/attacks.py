"""What a victim sees of attacks: its time to first token alone and during each, in turns, and what each leaves behind.

    victim   ----+
                 +--> maitred serve --> engine, encoder
    attacker ----+

One server with its bundled model and an encoder serves all of it. The victim is of one organisation, its attackers are
of another; where a row says so, they are another team of its own. Both have a key, and no limits. The victim asks for
one answer after the other, of some hundred tokens of prompt that are new each time. In each round every attack has its
turn, and just before it the victim is measured alone; so a slow moment of the machine meets both. The attacker's
process is there all the time.

* **The first token**: the median during an attack over the median alone. No answer of the victim is lost.
* **Memory**: what the gateway, its workers for grammars and its engines hold at most during an attack, above what they
  held before it.
* **Afterwards** nothing is in flight, queued or leased, no sequence runs, every KV block is free, and no process was
  started again.

The client of the attacker shares the processors with the server, and runs at a lower priority. What the server must do
for an attack (refuse it, read it, compute what is asked by right) it does on the same two cores, so ratios are those of
a small machine.
"""

import argparse
import asyncio
import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import psutil
import uvloop

from benchmarks.support.chaos.attack_cases import ATTACKS, ENCODER, Attack
from benchmarks.support.chaos.attacker_process import AttackerProcess
from benchmarks.support.concurrent_callers import WORDS
from benchmarks.support.installation import MODEL, Key, Organisation
from benchmarks.support.report import Report
from benchmarks.support.single_request import CHAT, Call, Client
from benchmarks.support.tenant_gateway import Settings, served, settled
from maitred.config.tree import BUNDLED_MODEL
from maitred.testing.server_process import READY_S, ServerProcess

SEED = 20261126
PROMPT_WORDS, OUTPUT_TOKENS = 500, 8
PAUSE_S = 0.05
"""Of the victim, between two requests, on average. It is drawn, or the victim would keep step with the engine."""
RAMP_S = 0.5
"""Until an attack is in full swing."""
WARM_UP_S = 2.0
SAMPLE_S = 0.1
ENGINE_MODULE = "maitred.cli.local_engine"
"""What an engine's process runs."""
MAX_IN_FLIGHT = 256
"""Few, so that one attacker reaches it."""
RATIO = 1.5
GATEWAY_MIB, ENGINES_MIB = 256, 256
"""That they may grow by during an attack. Bodies of up to 10 MiB come four at a time."""


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        rounds: In which every attack has its turn.
        seconds: Of each measurement.
    """

    rounds: int
    seconds: float


FULL = Size(rounds=5, seconds=4.0)
QUICK = Size(rounds=1, seconds=1.5)


@dataclass
class Measured:
    """What was measured of one attack, over all rounds."""

    alone_s: list[float] = field(default_factory=list)
    during_s: list[float] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    growth_mib: dict[str, float] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """The median during the attack over the median alone."""
        return statistics.median(self.during_s) / statistics.median(self.alone_s)

    def figures(self) -> dict[str, object]:
        """For the result file."""
        return {
            "alone_s": round(statistics.median(self.alone_s), 5),
            "during_s": round(statistics.median(self.during_s), 5),
            "during_worst_s": round(max(self.during_s), 5),
            "ratio": round(self.ratio, 3),
            "victims_requests": len(self.during_s),
            "lost": dict(self.lost),
            "attackers_answers": dict(self.answers.most_common()),
            "growth_mib": self.growth_mib,
            "left": self.left,
        }


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round; times have no bars")
    parser.add_argument("--only", help="attacks whose names contain this")
    parser.add_argument("--rounds", type=int, help="in which every attack has its turn")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    size = replace(size, rounds=arguments.rounds or size.rounds)
    attacks = [attack for attack in ATTACKS if (arguments.only or "") in attack.name]
    report = Report("attacks", seed=SEED, quick=arguments.quick)
    victim, neighbour, stranger = Key(), Key(), Key(("inference", "metrics"))
    with served(organisations(victim, neighbour, stranger), settings()) as server:
        run = Run(server, victim.secret, size)
        uvloop.run(run.attacked_by(attacks, AttackerProcess(server.url, stranger.secret, neighbour.secret)))
        report.require("exit code", server.stop(), at_most=0)
    report.figures = {attack.name: run.measured[attack.name].figures() for attack in attacks}
    print(table(run.measured))
    judge(report, run.measured)
    return report.finish()


def organisations(victim: Key, neighbour: Key, stranger: Key) -> dict[str, Organisation]:
    """The victim's, with a team beside its own, and the attacker's."""
    teams = {"victims": Organisation({"key": victim}), "neighbours": Organisation({"key": neighbour})}
    return {"house": Organisation({}, teams=teams), "strangers": Organisation({"key": stranger})}


def settings() -> Settings:
    """Settings of the server beside its tenants: as they come, but that one attacker can reach `max_in_flight`."""
    return {
        "server": {"max_in_flight": MAX_IN_FLIGHT},
        "encoder": {"path": str(BUNDLED_MODEL), "served_name": ENCODER},
    }


class Run:
    """Measurement of a victim, alone and during attacks.

    Args:
        server: That is attacked.
        key: Of the victim.
        size: How much is measured.

    Attributes:
        measured: By the attacks' names.
    """

    def __init__(self, server: ServerProcess, key: str, size: Size) -> None:
        self.measured: dict[str, Measured] = {}
        self._server = server
        self._key = key
        self._size = size
        self._rng = random.Random(SEED)
        self._number = 0
        self._client = Client(server.url, patience_s=60)

    async def attacked_by(self, attacks: Sequence[Attack], attackers: AttackerProcess) -> None:
        """Measures all rounds."""
        self.measured = {attack.name: Measured() for attack in attacks}
        await until_engines_are_up(self._server)
        async with attackers:
            await self._ask_for(WARM_UP_S, Measured())
            for _ in range(self._size.rounds):
                for attack in attacks:
                    await self._one(attack, attackers, self.measured[attack.name])
        self._client.close()

    async def _one(self, attack: Attack, attackers: AttackerProcess, measured: Measured) -> None:
        measured.alone_s += await self._ask_for(self._size.seconds, measured)
        memory = Memory(self._server.process.pid)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(memory.watch())
            await attackers.begin(attack.name)
            await asyncio.sleep(RAMP_S)
            during_s = await self._ask_for(self._size.seconds, measured)
            measured.during_s += during_s
            measured.answers.update(await attackers.end())
            watching.cancel()
        for name, grown_mib in memory.growth_mib.items():
            measured.growth_mib[name] = max(measured.growth_mib.get(name, 0.0), grown_mib)
        left = await left_behind(self._server)
        measured.left = {name: max(value, measured.left.get(name, 0.0)) for name, value in left.items()}
        print(f"{attack.name:36} {statistics.median(during_s) * 1e3:7.1f} ms {dict(measured.answers)}", flush=True)

    async def _ask_for(self, seconds: float, measured: Measured) -> list[float]:
        """Asks for one answer after the other for so long, and at least once; their times to first token."""
        times_s: list[float] = []
        clock = asyncio.get_running_loop().time
        until_s = clock() + seconds
        while not times_s or clock() < until_s:
            self._number += 1
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": " ".join(self._rng.choices(WORDS, k=PROMPT_WORDS))}],
                "max_tokens": OUTPUT_TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
            reply = await self._client.ask(Call(f"victim-{self._number}", self._key, body, CHAT))
            if not reply.whole:
                measured.lost[reply.code or f"HTTP {reply.status}"] += 1
            times_s.append((reply.arrivals_s[0] if reply.arrivals_s else reply.ended_s) - reply.sent_s)
            await asyncio.sleep(self._rng.uniform(0, 2 * PAUSE_S))
        return times_s


async def until_engines_are_up(server: ServerProcess) -> None:
    """Waits for both of them: the server is ready with the first."""
    async with asyncio.timeout(READY_S):
        while True:
            samples = await asyncio.to_thread(server.metrics)
            if samples["maitred_engine_up"] >= 2:
                return
            await asyncio.sleep(0.1)


async def left_behind(server: ServerProcess) -> dict[str, float]:
    """What a server holds once it has had time to let go of everything; all of it should be 0."""
    samples = await settled(server)
    return {
        "blocks": samples["maitred_engine_kv_blocks_total"] - samples["maitred_engine_kv_blocks_free"],
        "sequences": sum(samples[f"maitred_engine_{state}"] for state in ("running", "waiting", "paused")),
        "in_flight": samples["maitred_in_flight"],
        "leases": samples["maitred_leases"],
        "queued": samples["maitred_dispatch_waiting"] + samples["maitred_dispatch_running"],
        "restarts": samples["maitred_engine_restarts_total"],
    }


class Memory:
    """Resident memory of the server's processes, beyond what they held when this was made.

    Args:
        pid: Of the gateway.

    Attributes:
        growth_mib: The most so far: of the gateway with its workers for grammars, and of the engines.
    """

    def __init__(self, pid: int) -> None:
        self.growth_mib: dict[str, float] = {}
        self._gateway = psutil.Process(pid)
        self._before = resident_mib(self._gateway)

    async def watch(self) -> None:
        """Samples until it is cancelled."""
        while True:
            for name, now_mib in resident_mib(self._gateway).items():
                grown_mib = round(now_mib - self._before.get(name, 0.0), 1)
                self.growth_mib[name] = max(self.growth_mib.get(name, 0.0), grown_mib)
            await asyncio.sleep(SAMPLE_S)


def resident_mib(gateway: psutil.Process) -> dict[str, float]:
    """Resident memory of a gateway with its workers for grammars, and of its engines."""
    sums = {"gateway": gateway.memory_info().rss / 2**20, "engines": 0.0}
    for child in gateway.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            name = "engines" if ENGINE_MODULE in child.cmdline() else "gateway"
            sums[name] += child.memory_info().rss / 2**20
    return sums


def table(measured: dict[str, Measured]) -> str:
    """The result as Markdown."""
    lines = [
        "| attack | alone, ms | during, ms | ratio | growth of gateway; engines, MiB | left |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, one in measured.items():
        alone_ms, during_ms = (statistics.median(times_s) * 1e3 for times_s in (one.alone_s, one.during_s))
        growth = "; ".join(f"{value:.0f}" for value in one.growth_mib.values())
        lines.append(
            f"| {name} | {alone_ms:.1f} | {during_ms:.1f} | {one.ratio:.2f} | {growth} | {sum(one.left.values()):.0f} |"
        )
    return "\n".join(lines)


def judge(report: Report, measured: dict[str, Measured]) -> None:
    """Holds the figures against the bars."""
    for name, one in measured.items():
        if not report.quick:
            report.require(f"{name}: first token during over alone", round(one.ratio, 3), at_most=RATIO)
        report.require(f"{name}: victim's answers lost", one.lost.total(), at_most=0)
        report.require(f"{name}: left behind", sum(one.left.values()), at_most=0)
        report.require(f"{name}: growth of the gateway, MiB", one.growth_mib["gateway"], at_most=GATEWAY_MIB)
        report.require(f"{name}: growth of the engines, MiB", one.growth_mib["engines"], at_most=ENGINES_MIB)


if __name__ == "__main__":
    sys.exit(main())
