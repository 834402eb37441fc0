"""What choosing by prefix gains on four replicas: the Mooncake conversation trace, in simulated time.

12,031 requests of an hour with the 512-token blocks that they share (kvcache-ai/Mooncake, FAST'25, Apache-2.0). Lengths
are divided by 32, so that a block of theirs is one of ours of 16 tokens, and the times are kept. Real are the scheduler
and the block pool of every replica, the news of blocks that they tell, and `routing`'s placement and balance; simulated
is the time that a step takes: so much for the step, and so much for each token that is computed. There is no fair queue
before the replicas, and nothing travels.

The oracle is one cache with as many blocks as all replicas have together, through which all requests go in the order in
which they came.

    python -m benchmarks.prefix_balance --data ../shared/data/traces/mooncake
"""

import argparse
import heapq
import json
import lzma
import random
import sys
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.report import Report, percentiles
from maitred.core.balance import Candidate, Inquiry
from maitred.core.ports import StepTimes
from maitred.core.prefix import shared_scope
from maitred.core.request import Request, SamplingParams, TokenLogprobs
from maitred.core.service import ServiceWeights
from maitred.engine.engine import Engine
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.kv.table import BlockTable
from maitred.engine.scheduler.plan import StepPlan
from maitred.engine.scheduler.scheduler import Scheduler
from maitred.engine.scheduler.sequence import Sequence
from maitred.routing.balance.balancer import Balancer
from maitred.routing.balance.config import BalanceConfig, PolicyName
from maitred.routing.placement import Placement

SEED = 20261122
FILE = "conversation_trace.jsonl.xz"
REPLICAS, BLOCK_TOKENS, SCALE = 4, 16, 32
TOTAL_BLOCKS = 40_000
"""Of all replicas; an endless cache would use some 180,000."""
CONTEXT_TOKENS = 4_500
TIMES = StepTimes(fixed_s=0.01, token_s=0.0024)
"""A token here stands for 32. At 0.0036 s four replicas cannot keep up with the trace."""
SCOPE = "trace"
WEIGHTS = ServiceWeights()
HITS_OF_ORACLE, MOST_UNEVEN = 0.95, 1.2


@dataclass(frozen=True)
class Ask:
    """One request of the trace."""

    at_s: float
    prompt: list[int]
    output: int


def read(file: Path, limit: int | None) -> list[Ask]:
    """The trace; timestamps come in steps of three seconds, within which requests are spread evenly."""
    chance = random.Random(SEED)
    asks = []
    with lzma.open(file, "rt") as lines:
        for line, _ in zip(lines, range(limit) if limit else count(), strict=False):
            row = json.loads(line)
            prompt = [block for block in row["hash_ids"] for _ in range(BLOCK_TOKENS)]
            length = max(1, row["input_length"] // SCALE)
            at_s = row["timestamp"] / 1000 + chance.uniform(0, 3)
            asks.append(Ask(at_s, prompt[:length], max(1, row["output_length"] // SCALE)))
    return sorted(asks, key=lambda ask: ask.at_s)


class Clock:
    """Simulated."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        """Now."""
        return self.now_s

    def wall_s(self) -> float:
        """Now."""
        return self.now_s


class Paper:
    """Computes nothing; the tokens do not matter, for no prompt contains an answer of the replay."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.first: list[str] = []
        """Whose first token came with the step."""

    def execute(self, plan: StepPlan) -> tuple[list[int], list[TokenLogprobs | None]]:
        """See `maitred.engine.engine.Runner`."""
        self.step_s = TIMES.of(plan.tokens, 0)
        self.first = [chunk.sequence.request.id for chunk in plan.sampling if not chunk.sequence.output_tokens]
        tokens = [0] * len(plan.sampling)
        return tokens, [None] * len(tokens)

    def forget(self, sequence: Sequence) -> None:
        """See `maitred.engine.engine.Runner`."""


@dataclass
class Host:
    """One replica."""

    name: str
    engine: Engine
    paper: Paper
    stepping: bool = False
    busy_s: float = 0.0
    requests: int = 0
    output_tokens: float = 0.0
    """That are still to come of what was sent there."""

    def candidate(self, ask: Ask, held: int) -> Candidate:
        """As dispatch describes it."""
        waiting = self.engine.load().waiting_prompt_tokens
        return Candidate(
            self.name,
            requests=self.requests,
            prompt_tokens=waiting,
            output_tokens=self.output_tokens,
            held_tokens=held,
            wait_s=waiting * TIMES.token_s,
            prefill_s=(len(ask.prompt) - held) * TIMES.token_s,
        )


@dataclass
class Outcome:
    """What came of one policy."""

    ttft_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    hosts: list[Host] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """All of it."""
        loads = [host.engine.load() for host in self.hosts]
        served = [WEIGHTS.of(one.prompt_tokens, one.cached_tokens, one.output_tokens) for one in loads]
        prompts, cached = sum(one.prompt_tokens for one in loads), sum(one.cached_tokens for one in loads)
        return {
            "ttft_s": percentiles(self.ttft_s),
            "hit_rate": cached / prompts,
            "max_over_mean_load": max(served) / (sum(served) / len(served)),
            "seconds_until_all_is_answered": self.ended_s,
            "preemptions": sum(one.preemptions for one in loads),
            "requests_per_busy_s": len(self.ttft_s) / sum(host.busy_s for host in self.hosts),
        }


def play(asks: Items[Ask], policy: PolicyName) -> Outcome:
    """The whole trace under one policy."""
    clock, outcome, chance = Clock(), Outcome(), random.Random(SEED)
    bound = 1.2 if policy == "predicted_ttft" else None
    placement = Placement(Balancer(BalanceConfig(policy=policy, bound=bound), WEIGHTS, chance.random))
    hosts = {f"r{number}": _host(f"r{number}", clock) for number in range(REPLICAS)}
    outcome.hosts = list(hosts.values())
    for host in outcome.hosts:
        _tell(placement, host, whole=True)
    numbers = count()
    events: list[tuple[float, int, Any]] = [(ask.at_s, next(numbers), partial(_arrive, ask)) for ask in asks]
    heapq.heapify(events)
    sent: dict[str, tuple[Ask, Host]] = {}

    def _begin(host: Host) -> None:
        """Plans a step, whose tokens come when it ends."""
        if host.stepping or not host.engine.busy:
            return
        host.stepping = True
        outputs = host.engine.step().get(SCOPE, [])
        host.busy_s += host.paper.step_s
        heapq.heappush(events, (clock.now_s + host.paper.step_s, next(numbers), partial(_end, host, outputs)))

    def _end(host: Host, outputs: list[Any]) -> None:
        host.stepping = False
        outcome.ttft_s += [clock.now_s - sent[id_][0].at_s for id_ in host.paper.first]
        for output in outputs:
            host.output_tokens -= len(output.delta.tokens)
            if output.delta.finish is not None:
                host.requests -= 1
                outcome.ended_s = clock.now_s
        _tell(placement, host)
        _begin(host)

    while events:
        clock.now_s, number, event = heapq.heappop(events)
        if event.func is _arrive:
            ask, host = event(placement, hosts)
            request = Request(str(number), ask.prompt, SamplingParams(max_tokens=ask.output, seed=0), cache_scope=SCOPE)
            sent[request.id] = ask, host
            host.engine.submit(SCOPE, request)
            _begin(host)
        else:
            event()
    return outcome


def _arrive(ask: Ask, placement: Placement, hosts: dict[str, Host]) -> tuple[Ask, Host]:
    held = placement.held(SCOPE, [ask.prompt])
    candidates = [host.candidate(ask, held[name]) for name, host in hosts.items()]
    host = hosts[placement.choose(Inquiry(len(ask.prompt), ask.output), candidates).name]
    placement.sent(host.name, 0, SCOPE, [ask.prompt])
    host.requests += 1
    host.output_tokens += ask.output
    return ask, host


def _host(name: str, clock: Clock) -> Host:
    scheduler = Scheduler(
        BlockPool(TOTAL_BLOCKS // REPLICAS),
        block_tokens=BLOCK_TOKENS,
        max_sequences=64,
        step_tokens=128,
        context_tokens=CONTEXT_TOKENS,
        eos_token_ids=(-1,),
    )
    paper = Paper()
    return Host(name, Engine(scheduler, paper, clock, vocab_size=1 << 30, max_choices=1), paper)


def _tell(placement: Placement, host: Host, *, whole: bool = False) -> None:
    news = host.engine.block_news(whole=whole)
    if news is not None:
        placement.heard(host.name, news)


def oracle(asks: Items[Ask], blocks: int) -> float:
    """Which part of all prompt tokens one cache of so many blocks finds."""
    pool, found = BlockPool(blocks), 0
    for ask in asks:
        table = BlockTable(pool, BLOCK_TOKENS, shared_scope(SCOPE))
        found += table.open(ask.prompt) or 0
        table.publish(ask.prompt, len(ask.prompt))
        table.release()
    return found / sum(len(ask.prompt) for ask in asks)


def main() -> int:
    """Runs the benchmark; the exit code says whether every bar was met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first 1,500 requests")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/traces/mooncake"), help=f"folder with {FILE}")
    arguments = parser.parse_args()
    if not (arguments.data / FILE).is_file():
        print(f"{arguments.data / FILE} is not there; name its folder with --data.")
        return 2
    report = Report("prefix_balance", seed=SEED, quick=arguments.quick)
    asks = read(arguments.data / FILE, 1500 if arguments.quick else None)
    policies: tuple[PolicyName, ...] = ("predicted_ttft", "round_robin", "least_requests")
    by_policy: dict[str, dict[str, Any]] = {}
    for policy in policies:
        by_policy[policy] = play(asks, policy).figures()
        print(policy, by_policy[policy], flush=True)
    best, aware = oracle(asks, TOTAL_BLOCKS), by_policy["predicted_ttft"]
    report.figures = {
        "requests": len(asks),
        "total_blocks": TOTAL_BLOCKS,
        "oracle_hit_rate": best,
        "endless_cache_hit_rate": oracle(asks, 300_000),
        "by_policy": by_policy,
        "over_predicted_ttft": {
            policy: {
                "ttft_mean": figures["ttft_s"]["mean"] / aware["ttft_s"]["mean"],
                "ttft_p99": figures["ttft_s"]["p99"] / aware["ttft_s"]["p99"],
                "requests_per_busy_s": figures["requests_per_busy_s"] / aware["requests_per_busy_s"],
            }
            for policy, figures in by_policy.items()
        },
    }
    print({key: value for key, value in report.figures.items() if key != "by_policy"})
    report.require("hit rate / that of one cache with all blocks", aware["hit_rate"] / best, at_least=HITS_OF_ORACLE)
    report.require("max/mean load", aware["max_over_mean_load"], at_most=MOST_UNEVEN)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
