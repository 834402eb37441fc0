"""What the lines cost: ten thousand requests of a thousand tenants wait, and others come and go.

Every operation is timed by itself, and in the cycle of a request: it joins, is the head, is taken, is charged, ends.
The cycle is timed with a thousand, ten thousand and a hundred thousand waiting, ten of each key. A cost that grows with
the logarithm grows by 1.7 from the first to the last, and the processor's caches add to that. Counted is the thread's
own processor time, the least of several rounds, since other work on the machine is not the queue's cost. The engine's
half, a whole step, is in `benchmarks.engine.step_cost`.
"""

import argparse
import gc
import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks.support.report import Report
from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.fairness.fair_queue import FairQueue, QueueEntry, QueueOrderConfig, make_queue

SEED = 20261121
REQUESTS_PER_KEY, RUNNING = 10, 256
SIZES = (1_000, 10_000, 100_000)
LINES = {
    "fair": QueueOrderConfig(),
    "fifo": QueueOrderConfig(policy="fifo"),
    "priority": QueueOrderConfig(policy="priority"),
    "deficit": QueueOrderConfig(policy="deficit"),
}
CHARGES_MS, GROWTH = 0.5, 3.0


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="policy fair alone, fewer rounds")
    arguments = parser.parse_args()
    report = Report("scheduler_cost", seed=SEED, quick=arguments.quick)
    rounds, cycles = (3, 1_000) if arguments.quick else (7, 3_000)
    for policy, config in list(LINES.items())[: 1 if arguments.quick else None]:
        figures: dict[str, Any] = {str(size): cycle_us(config, size, rounds, cycles) for size in SIZES}
        figures["growth"] = round(figures[str(SIZES[-1])] / figures[str(SIZES[0])], 2)
        figures["operations_us"] = operations_us(config, rounds)
        report.figures[policy] = figures
        print(policy, figures, flush=True)
        report.require(f"{policy}: cycle at 100,000 waiting over 1,000", figures["growth"], at_most=GROWTH)
    charges_ms = report.figures["fair"]["operations_us"]["charge"] * RUNNING / 1000
    report.figures["charges_of_a_step_ms"] = round(charges_ms, 3)
    report.require(f"fair: {RUNNING} charges, ms", charges_ms, at_most=CHARGES_MS)
    return report.finish()


def filled(config: QueueOrderConfig, size: int) -> tuple[FairQueue[int], list[QueueEntry[int]], random.Random]:
    """A queue with so many waiting, and others that might join."""
    draw = random.Random(SEED)
    keys = size // REQUESTS_PER_KEY
    flows = [
        Flow((FlowLevel(f"org {number % (keys // 10)}"), FlowLevel(f"key {number}")), draw.choice(list(PriorityClass)))
        for number in range(keys)
    ]
    queue: FairQueue[int] = make_queue(config)
    entries = [
        QueueEntry(number, draw.choice(flows), arrived_s=number / size, service=float(draw.randint(10, 1000)))
        for number in range(2 * size)
    ]
    for entry in entries[:size]:
        queue.add(entry, 1.0)
    return queue, entries[size:], draw


def cycle_us(config: QueueOrderConfig, size: int, rounds: int, cycles: int) -> float:
    """Microseconds for one request to join, be the head, be taken, charged and done, with so many waiting."""
    queue, others, _ = filled(config, size)
    position = 0
    best_s = float("inf")
    for _ in range(rounds):
        gc.collect()
        began_s = time.thread_time()
        for _ in range(cycles):
            queue.add(others[position % len(others)], 1.0)
            head = queue.head(1.0)
            assert head is not None
            queue.take(head, 1.0)
            queue.charge(head.flow, head.service)
            queue.done(head.flow)
            others[position % len(others)] = head
            position += 1
        best_s = min(best_s, time.thread_time() - began_s)
    return round(best_s / cycles * 1e6, 2)


def operations_us(config: QueueOrderConfig, rounds: int) -> dict[str, float]:
    """Microseconds for each operation by itself, with 10,000 waiting and 256 running."""
    queue, others, draw = filled(config, 10_000)
    running = []
    for _ in range(RUNNING):
        head = queue.head(1.0)
        assert head is not None
        queue.take(head, 1.0)
        running.append(head)
    some = others[:RUNNING]

    def charge() -> None:
        for entry in running:
            queue.charge(entry.flow, 2.0)

    def join() -> None:
        for entry in some:
            queue.add(entry, 1.0)

    def leave() -> None:
        for entry in some:
            queue.remove(entry)

    def ahead() -> None:
        for entry in some:
            queue.ahead(entry, 1.0)

    def over_service() -> None:
        for entry in running:
            queue.over_service(entry.flow)

    def head_again() -> None:
        for _ in range(RUNNING):
            queue.head(1.0)

    operations = {
        "charge": charge,
        "head": head_again,
        "add": join,
        "ahead, waiting": ahead,
        "remove": leave,
        "ahead, arriving": ahead,
        "over_service": over_service,
    }
    least = dict.fromkeys(operations, float("inf"))
    for _ in range(rounds):
        for name, operation in operations.items():
            least[name] = min(least[name], _seconds(operation))
        draw.shuffle(some)
    return {name: round(seconds / RUNNING * 1e6, 2) for name, seconds in least.items()}


def _seconds(operation: Callable[[], None]) -> float:
    began_s = time.thread_time()
    operation()
    return time.thread_time() - began_s


if __name__ == "__main__":
    raise SystemExit(main())
