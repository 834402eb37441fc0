"""What the engine's scheduler costs per step: 256 running sequences, 10,000 waiting, 1,000 tenants in four classes.

A step is planned and booked for a model that takes no time. Others arrive and leave as fast as sequences end, so
that the line stays as long as it is. Counted is the scheduler's own processor time, since other work on the machine is
not its cost; the wall clock's is given beside it.
"""

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support.report import Report
from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.config import BatchLineConfig, EngineConfig
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.scheduler.scheduler import Scheduler
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.step_times import StepWork

SEED = 20261121
RUNNING, WAITING, TENANTS = 256, 10_000, 1_000
STEP_S = 0.02


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="300 steps, policies fair and fifo alone")
    arguments = parser.parse_args()
    report = Report("step_cost", seed=SEED, quick=arguments.quick)
    steps = 300 if arguments.quick else 2000
    for policy in ("fair", "fifo") if arguments.quick else ("fair", "fifo", "priority", "deficit"):
        report.figures[policy] = Bench(BatchLineConfig(policy=policy)).run(steps)
    for policy, figures in report.figures.items():
        report.require(f"{policy}: ms of a step", figures["step_ms"]["mean"], at_most=2.0)
    return report.finish()


@dataclass
class Bench:
    """A scheduler with many sequences."""

    line: BatchLineConfig
    draw: random.Random = field(default_factory=lambda: random.Random(SEED))
    now_s: float = 0.0
    made: int = 0
    waiting: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = EngineConfig(
            block_tokens=16, max_sequences=RUNNING, guests=0, step_tokens=768, line=self.line, itl_objective_s=1.0
        )
        self.scheduler = Scheduler(BlockPool(RUNNING * 40), config, context_tokens=2048, eos_token_ids=())

    def run(self, steps: int) -> dict[str, Any]:
        """Milliseconds of steps, and microseconds of what comes and goes between them."""
        adding_s = [self.add() for _ in range(RUNNING + WAITING)]
        for _ in range(100):
            self.step()
        cancelling_s: list[float] = []
        processor_s: list[float] = []
        wall_s: list[float] = []
        for _ in range(steps):
            wall, processor = self.step()
            wall_s.append(wall)
            processor_s.append(processor)
            cancelling_s.append(self.cancel())
            while self.scheduler.waiting < WAITING:
                adding_s.append(self.add())
        return {
            "running": self.scheduler.running,
            "waiting": self.scheduler.waiting,
            "step_ms": _spread(processor_s, 1e3),
            "step_wall_ms": _spread(wall_s, 1e3),
            "add_us": _spread(adding_s, 1e6),
            "cancel_us": _spread(cancelling_s, 1e6),
        }

    def add(self) -> float:
        """One more request; the time that it took."""
        self.made += 1
        tenant = self.draw.randrange(TENANTS)
        flow = Flow((FlowLevel(f"organisation-{tenant}"), FlowLevel(f"key-{tenant}")), list(PriorityClass)[tenant % 4])
        prompt = [self.draw.randrange(30_000) for _ in range(self.draw.randint(16, 128))]
        sampling = SamplingParams(max_tokens=self.draw.randint(20, 400), seed=0)
        request = EngineRequest(str(self.made), prompt, sampling, flow=flow, deadline_in_s=self.draw.uniform(600, 6000))
        start_s = time.thread_time()
        self.waiting += self.scheduler.add(request, self.now_s)
        return time.thread_time() - start_s

    def cancel(self) -> float:
        """One that waits leaves; the time that it took."""
        while self.waiting:
            place = self.draw.randrange(len(self.waiting))
            self.waiting[place], self.waiting[-1] = self.waiting[-1], self.waiting[place]
            sequence = self.waiting.pop()
            if sequence.cached_tokens is None:  # it was never admitted
                start_s = time.thread_time()
                self.scheduler.cancel(sequence)
                return time.thread_time() - start_s
        raise RuntimeError("Nobody waits.")

    def step(self) -> tuple[float, float]:
        """Seconds of wall clock and of processor time of one step."""
        wall_s, processor_s = time.perf_counter(), time.thread_time()
        plan = self.scheduler.plan(self.now_s)
        sampled = [[1] for _ in plan.sampling]
        self.scheduler.commit(plan, sampled)
        self.scheduler.on_step_time(StepWork.of(plan), STEP_S)
        self.now_s += STEP_S
        return time.perf_counter() - wall_s, time.thread_time() - processor_s


def _spread(seconds: list[float], scale: float) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "mean": round(scale * statistics.mean(ordered), 4),
        "p50": round(scale * ordered[len(ordered) // 2], 4),
        "p99": round(scale * ordered[int(0.99 * len(ordered))], 4),
    }


if __name__ == "__main__":
    sys.exit(main())
