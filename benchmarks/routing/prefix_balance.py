"""What choosing by prefix gains on four replicas: the Mooncake conversation trace, in simulated time.

12,031 requests of an hour with the 512-token blocks that they share (kvcache-ai/Mooncake, FAST'25, Apache-2.0). Lengths
are divided by 32, so that a block of theirs is one of ours of 16 tokens, and the times are kept. What runs is what runs
in production, with an injected clock: the dispatch core, where requests wait and are released as credits allow, and
its choice among the replicas that have room then; `routing`'s placement and balance; the scheduler and the block pool
of every replica, its reports after every step and the news of blocks that it tells. Simulated is the time that a step
takes: so much for the step, and so much for each token that is computed; and nothing travels.

The oracle is one cache with as many blocks as all replicas have together, through which all requests go in the order in
which they came.

    python -m benchmarks prefix_balance --data ../shared/data/traces/mooncake
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

from benchmarks.support.figures import prefix_balance_plot
from benchmarks.support.report import RESULTS, Report, percentiles
from benchmarks.support.requirements import require_file
from benchmarks.support.simulated_replicas import BLOCK_TOKENS, Clock, SimulatedReplica
from maitred.core.balance import PlacementRequest, ReplicaCandidate
from maitred.core.flow import Flow, FlowLevel, PriorityClass, ServiceWeights
from maitred.core.prefix import shared_scope
from maitred.core.request import EngineRequest, SamplingParams
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.queue import QueuedRequest
from maitred.dispatch.request import DispatchRequest, Endpoint
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.kv.table import BlockTable
from maitred.routing.balance.balancer import Balancer
from maitred.routing.balance.config import BalanceConfig
from maitred.routing.prefix import PrefixCacheBalancer
from maitred.wire.frames import TokenOutput

SEED = 20261122
FILE = "conversation_trace.jsonl.xz"
ORIGIN = "it is the conversation trace of kvcache-ai/Mooncake on GitHub, packed with xz; name its folder with --data."
QUICK_REQUESTS = 1_000
REPLICAS, SCALE = 4, 32
BLOCKS = 10_000
"""Of each replica; an endless cache would use some 180,000 in all."""
LOADS, PART = (0.5, 0.8, 1.2), 3_000
"""Times the trace's own rate, and how many of its requests are played at each of them. At 1.5 times it four replicas
cannot keep up."""
SCOPE = "trace"
FLOW = Flow((FlowLevel(SCOPE),), PriorityClass.STANDARD)
WEIGHTS = ServiceWeights()
HITS_OF_ORACLE, MOST_UNEVEN = 0.95, 1.2
POLICIES = {
    "predicted_ttft": BalanceConfig(),
    "predicted_ttft, own only": BalanceConfig(recompute_price=1.0),
    "least_requests": BalanceConfig(policy="least_requests", bound=None),
    "round_robin": BalanceConfig(policy="round_robin", bound=None),
}


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


class WatchedPlacement(PrefixCacheBalancer):
    """Counts prompt tokens that some replica with room held, and the chosen one did not."""

    left_tokens = 0

    def choose(self, request: PlacementRequest, candidates: Items[ReplicaCandidate]) -> ReplicaCandidate:
        """See `core.balance.CacheAwareBalancer`."""
        chosen = super().choose(request, candidates)
        self.left_tokens += max(candidate.cached_tokens for candidate in candidates) - chosen.cached_tokens
        return chosen


@dataclass
class Run:
    """One policy, from the first request to the last answer."""

    asks: Items[Ask]
    config: BalanceConfig
    replicas: int = REPLICAS
    clock: Clock = field(default_factory=Clock)
    ttft_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.placement = WatchedPlacement(Balancer(self.config, WEIGHTS, random.Random(SEED).random))
        names = [f"r{number}" for number in range(self.replicas)]
        self.hosts = {name: SimulatedReplica(name, BLOCKS, self.clock) for name in names}
        for name, host in self.hosts.items():
            if (news := host.engine.block_update(whole=True)) is not None:
                self.placement.on_block_update(name, news)
        endpoints = [Endpoint(name, host) for name, host in self.hosts.items()]
        self.core = DispatchCore(endpoints, DispatchConfig(), self.placement)
        self._queued: dict[str, QueuedRequest] = {}
        self._numbers = count()
        self._events = [(ask.at_s, next(self._numbers), partial(self._arrive, ask)) for ask in self.asks]
        heapq.heapify(self._events)

    def play(self) -> dict[str, Any]:
        """Until nothing is left to do; the figures."""
        while self._events:
            self.clock.now_s, _, event = heapq.heappop(self._events)
            event()
        return self._figures()

    def _arrive(self, ask: Ask) -> None:
        id_ = str(next(self._numbers))
        dispatch_request = DispatchRequest(
            id_, SCOPE, FLOW, len(ask.prompt), [ask.prompt], max_tokens=ask.output, choices=1, arrived_s=ask.at_s
        )
        queued = self._queued[id_] = self.core.new_entry(dispatch_request)
        self.core.join(queued, self.clock.now_s)
        self._turn()

    def _turn(self) -> None:
        """Releases whom there are credits for, as the dispatcher does after everything that happens."""
        for queued in self.core.run_dispatch_pass(self.clock.now_s):
            assert queued.allocation is not None, "nobody has a deadline, so nobody fails"
            dispatch_request, host = queued.request, self.hosts[queued.allocation.endpoint_state.endpoint.name]
            params = SamplingParams(max_tokens=dispatch_request.max_tokens, seed=0)
            host.submit(
                EngineRequest(dispatch_request.id, list(dispatch_request.prompts[0]), params, cache_scope=SCOPE)
            )
            self.core.on_submitted(queued)
            self._begin(host)

    def _begin(self, host: SimulatedReplica) -> None:
        if (step := host.begin()) is not None:
            ends_s = self.clock.now_s + step[0]
            heapq.heappush(self._events, (ends_s, next(self._numbers), partial(self._end, host, step[1])))

    def _end(self, host: SimulatedReplica, outputs: list[TokenOutput]) -> None:
        now_s, core = self.clock.now_s, self.core
        if (news := host.end()) is not None:
            self.placement.on_block_update(host.name, news)
        for output in outputs:
            queued, delta = self._queued[output.request_id], output.delta
            if not queued.has_output:
                self.ttft_s.append(now_s - queued.request.arrived_s)
                core.charge_tokens(queued, queued.request.prompt_tokens, delta.cached_tokens, 0)
                core.on_first_token(queued, now_s)
            core.charge_tokens(queued, 0, 0, len(delta.tokens))
            if delta.finish is not None:
                core.leave(self._queued.pop(output.request_id), now_s, finished=True)
        self._turn()
        self._begin(host)

    def _figures(self) -> dict[str, Any]:
        hosts = self.hosts.values()
        loads = [host.engine.load() for host in hosts]
        served = [WEIGHTS.service(load.prompt_tokens, load.cached_tokens, load.output_tokens) for load in loads]
        prompts, cached = sum(load.prompt_tokens for load in loads), sum(load.cached_tokens for load in loads)
        assert len(self.ttft_s) == len(self.asks) == sum(load.finished for load in loads)
        hit_rate, best = cached / prompts, oracle(self.asks, BLOCKS * self.replicas)
        return {
            "ttft_s": percentiles(self.ttft_s),
            "hit_rate": hit_rate,
            "oracle_hit_rate": best,
            "hit_rate_over_oracle": hit_rate / best,
            "held_elsewhere": self.placement.left_tokens / prompts,
            "max_over_mean_load": max(served) / (sum(served) / len(served)),
            "seconds_until_all_is_answered": self.clock.now_s,
            "preemptions": sum(load.preemptions for load in loads),
            "requests_per_busy_s": len(self.asks) / sum(host.busy_s for host in hosts),
        }


def oracle(asks: Items[Ask], blocks: int) -> float:
    """Which part of all prompt tokens one cache of so many blocks finds."""
    pool, found = BlockPool(blocks), 0
    for ask in asks:
        table = BlockTable(pool, BLOCK_TOKENS, shared_scope(SCOPE))
        found += table.open(ask.prompt) or 0
        table.publish(ask.prompt, len(ask.prompt))
        table.release()
    return found / sum(len(ask.prompt) for ask in asks)


def played(asks: Items[Ask], name: str, *, load: float = 1.0, replicas: int = REPLICAS) -> dict[str, Any]:
    """One policy at so many times the trace's rate; with other than four replicas, at the same rate for each."""
    speed = load * replicas / REPLICAS
    faster = [Ask(ask.at_s / speed, ask.prompt, ask.output) for ask in asks]
    figures = Run(faster, POLICIES[name], replicas).play()
    print(f"{name}, load {load:g}, {replicas} replicas, {len(asks)} requests:", figures, flush=True)
    return figures


def main() -> int:
    """Runs the benchmark; the exit code says whether every bar was met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help=f"the first {QUICK_REQUESTS:,} requests, at the trace's rate"
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data/traces/mooncake"), help=f"folder with {FILE}")
    arguments = parser.parse_args()
    require_file(arguments.data / FILE, ORIGIN)
    report = Report("prefix_balance", seed=SEED, quick=arguments.quick)
    asks = read(arguments.data / FILE, QUICK_REQUESTS if arguments.quick else None)
    by_policy = {name: played(asks, name) for name in POLICIES}
    aware = by_policy["predicted_ttft"]
    report.figures = {
        "requests": len(asks),
        "blocks_of_each_replica": BLOCKS,
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
    if not arguments.quick:
        part = asks[:PART]
        report.figures["part"] = PART
        report.figures["by_load"] = {
            load: {name: played(part, name, load=load) for name in POLICIES} for load in sorted((*LOADS, 1.0))
        }
        report.figures["by_replicas"] = {
            replicas: played(part, "predicted_ttft", replicas=replicas) for replicas in (2, 8)
        }
        prefix_balance_plot.plot(report.figures, RESULTS / "prefix_balance.svg")
    hits = aware["hit_rate_over_oracle"]
    report.require("hit rate / that of one cache with all blocks", hits, at_least=HITS_OF_ORACLE)
    report.require("max/mean load", aware["max_over_mean_load"], at_most=MOST_UNEVEN)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
