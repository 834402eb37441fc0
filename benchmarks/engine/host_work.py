"""What a step costs beside its arithmetic: plan, tensors of the batch, dispatch of every kernel, sampling, report.

A model of the same depth that has next to nothing to multiply takes as long as all of that takes. So the step of a
*thin* model is measured, with as many sequences as the real one would have: same layers and heads, narrow rows, few
tokens of context. It is an upper bound, since its kernels do compute something. Counted is processor time, since other
work on the machine is not its cost. For the share of a whole step, steps of the real model are timed between those of
the thin one.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.report import Report
from benchmarks.support.shapes import LLAMA_33M, QWEN_0_5B, WORK, random_llama, random_model, random_qwen
from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig
from maitred.wire.frames import Step, encode_frame

SEED = 20261122
HEAD_DIM = 4
STEPS = 14
"""Of one block of context, so that attention reads next to nothing."""


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small shape, few steps, no whole steps")
    parser.add_argument("--threads", type=int, default=2, help="of the whole steps")
    arguments = parser.parse_args()
    report = Report("host_work", seed=SEED, quick=arguments.quick)
    rounds = 3 if arguments.quick else 12
    small = Bench(thin("llama-33m-thin", LLAMA_33M), threads=1)
    for rows in (1, 32, 128):
        figures = small.host_ms(rows, rounds)
        report.figures[f"33M shape, {rows} sequences"] = figures
        print(f"33M shape, {rows} sequences: {figures}", flush=True)
        if rows == 32:
            report.require("33M shape: ms of host work at 32 sequences", figures["step_ms"], at_most=1.5)
    if not arguments.quick:
        deep = Bench(thin("qwen2.5-0.5b-thin", QWEN_0_5B), threads=1)
        for name, bench, folder in (("33M", small, random_llama()), ("0.5B", deep, random_qwen())):
            real = Bench(folder, threads=arguments.threads)
            host, whole = [], []
            for _ in range(3):
                host.append(bench.host_ms(32, rounds)["step_ms"])
                whole.append(real.whole_ms(32))
            share = statistics.median(h / w for h, w in zip(host, whole, strict=True))
            beside = {"host_ms": host, "whole_ms": whole, "share": round(share, 4)}
            report.figures[f"{name} shape, share of a step of 32"] = beside
            print(f"{name} shape: {beside}", flush=True)
            if name == "0.5B":
                report.require("0.5B shape: host work's share of a step", share, at_most=0.05)
    return report.finish()


def thin(name: str, shape: dict[str, Any]) -> Path:
    """A model as deep as `shape`, with as many heads, and hardly a number in it."""
    width = HEAD_DIM * shape["num_attention_heads"]
    narrow = {"hidden_size": width, "intermediate_size": width, "head_dim": HEAD_DIM, "vocab_size": 256}
    return random_model(WORK / name, {**shape, **narrow}, SEED)


class Bench:
    """An engine with requests that all begin at once.

    Args:
        folder: Its model.
        threads: Of a step.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        self._threads = threads
        config = EngineConfig(
            device="cpu", dtype="fp32", threads=threads, kv_memory_bytes=1 << 30, context_tokens=1024, max_sequences=128
        )
        self._engine, self._card = build(folder, config)
        self._draw = random.Random(SEED)
        self._steps = 0

    def host_ms(self, rows: int, rounds: int) -> dict[str, float]:
        """Milliseconds of a thread: of a decode step with its report, and of the report alone."""
        steps, reports = [], []
        for _ in range(rounds):
            self._begin(rows, prompt_tokens=2, output_tokens=STEPS)
            for _ in range(STEPS - 3):
                start_s = time.thread_time()
                outputs = self._engine.step()
                stepped_s = time.thread_time()
                for own in outputs.values():
                    encode_frame(Step(self._steps, own, [], self._engine.load(), 0, None))
                done_s = time.thread_time()
                steps.append(1e3 * (done_s - start_s))
                reports.append(1e3 * (done_s - stepped_s))
            self._engine.cancel_owner(None)
        return {"step_ms": round(statistics.median(steps), 3), "report_ms": round(statistics.median(reports), 3)}

    def whole_ms(self, rows: int) -> float:
        """Milliseconds of wall clock of a decode step after 128 tokens."""
        torch.set_num_threads(self._threads)
        self._begin(rows, prompt_tokens=128, output_tokens=64)
        times = [_ms(self._engine.step) for _ in range(8)]
        self._engine.cancel_owner(None)
        return round(statistics.median(times), 2)

    def _begin(self, rows: int, *, prompt_tokens: int, output_tokens: int) -> None:
        """Submits, and goes on until all decode."""
        for number in range(rows):
            prompt = [self._draw.randrange(10, self._card.vocab_size) for _ in range(prompt_tokens)]
            sampling = SamplingParams(max_tokens=output_tokens, seed=number, temperature=0.0, ignore_eos=True)
            self._engine.submit(None, EngineRequest(id=str(number), prompt=prompt, sampling=sampling))
        while sum(map(len, self._engine.step().values())) < rows:
            pass


def _ms(action: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start_s)


if __name__ == "__main__":
    sys.exit(main())
