"""What a shared prefix saves: 32 requests that begin with the same 512 tokens, prefix cache on and off.

All requests arrive at once at an engine that has never seen the prefix, so with the cache on it is computed once and
shared inside the batch. Rounds alternate between the two engines; each round uses a prefix of its own.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.support.report import Report
from benchmarks.support.shapes import BUNDLED, random_qwen
from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig
from maitred.engine.engine import Engine

SEED = 20260103
REQUESTS, PREFIX_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 32, 512, 16, 16


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="bundled model only, one round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    report = Report("prefix", seed=SEED, quick=arguments.quick)
    report.figures["bundled"] = compare(BUNDLED, arguments.threads, 1 if arguments.quick else arguments.rounds)
    if not arguments.quick:
        report.figures["qwen2.5-0.5b"] = compare(random_qwen(), arguments.threads, 1)
    expected = PREFIX_TOKENS * (REQUESTS - 1) / ((PREFIX_TOKENS + OWN_TOKENS) * REQUESTS)
    for shape, figures in report.figures.items():
        report.require(f"{shape}: hit rate over what is possible", figures["hit_rate"] / expected, at_least=0.99)
        report.require(f"{shape}: time off / time on", figures["off_over_on"], at_least=2.0)
    return report.finish()


def compare(folder: Path, threads: int, rounds: int) -> dict[str, Any]:
    """Seconds for all requests with the cache on and off, and the share of prompt tokens found."""
    engines = {}
    for name, prefix_cache in (("on", True), ("off", False)):
        config = EngineConfig(
            device="cpu",
            dtype="fp32",
            threads=threads,
            kv_memory_bytes=1 << 30,
            context_tokens=1024,
            prefix_cache=prefix_cache,
        )
        engines[name], card = build(folder, config)
        answer_all(engines[name], random.Random(0), card.vocab_size, requests=2)
    draw = random.Random(SEED)
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    before = engines["on"].load()
    for _ in range(rounds):
        seed = draw.random()
        for name, engine in engines.items():
            seconds[name].append(answer_all(engine, random.Random(seed), card.vocab_size, requests=REQUESTS))
    after = engines["on"].load()
    figures = {
        "on_s": statistics.median(seconds["on"]),
        "off_s": statistics.median(seconds["off"]),
        "off_over_on": statistics.median([off / on for on, off in zip(seconds["on"], seconds["off"], strict=True)]),
        "hit_rate": (after.cached_tokens - before.cached_tokens) / (after.prompt_tokens - before.prompt_tokens),
    }
    print(folder.name, figures, flush=True)
    return figures


def answer_all(engine: Engine, draw: random.Random, vocab_size: int, *, requests: int) -> float:
    """Seconds until all are answered."""
    prefix = [draw.randrange(10, vocab_size) for _ in range(PREFIX_TOKENS)]
    for number in range(requests):
        prompt = prefix + [draw.randrange(10, vocab_size) for _ in range(OWN_TOKENS)]
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, seed=0, temperature=0.0, ignore_eos=True)
        engine.submit(None, EngineRequest(id=str(number), prompt=prompt, sampling=sampling))
    start_s = time.perf_counter()
    while engine.busy:
        engine.step()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    sys.exit(main())
