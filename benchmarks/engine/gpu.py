"""The engine on a GPU: tokens a second against Transformers' continuous batching, and against the memory's speed.

A decode step cannot be faster than the GPU reads the weights and the keys and values of its sequences. How fast it
reads is measured by copying a gibibyte within its memory, and how long a step takes is compared with that *floor*, the
least that it can take. Engine and rival answer the same prompts in turns, in bf16 and greedily, each in this process
and with the model in memory all the time.

Without a GPU there is nothing to measure: the benchmark says so and ends with status 77, which test harnesses take for
"skipped". It writes no result then.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.report import Report
from benchmarks.support.requirements import RequirementMissing
from benchmarks.support.shapes import random_qwen
from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import AttentionKernels, EngineConfig, GPUConfig
from maitred.engine.engine import Engine

SEED = 20261122
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
CONTEXT_TOKENS = 2048
COPIED_BYTES = 1 << 30
WARM_STEPS, STEPS = 8, 64
LEAST_OVER_RIVAL = 1.2
LEAST_OF_BOUND = 0.5
"""Of the memory's speed, with one sequence: what is left for launches, norms and sampling."""


@dataclass(frozen=True)
class Shape:
    """What a decode step has to read."""

    weight_bytes: int
    token_bytes: int
    """Keys and values of a token, all layers."""

    def step_bytes(self, sequences: int, context_tokens: int) -> int:
        """Of so many sequences with so many tokens each."""
        return self.weight_bytes + sequences * context_tokens * self.token_bytes


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two batch sizes, one round")
    parser.add_argument("--attention", choices=["auto", "flashinfer", "triton", "torch"], default="auto")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise RequirementMissing(f"torch {torch.__version__} finds no CUDA device here: run this on a GPU.")
    report = Report("gpu", seed=SEED, quick=arguments.quick)
    folder = random_qwen()
    sizes, rounds = ([1, 32], 1) if arguments.quick else ([1, 8, 32, 128, 256], 3)
    bytes_per_s = copy_bytes_per_s()
    report.figures |= {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "attention": arguments.attention,
        "copy_gb_per_s": round(bytes_per_s / 1e9, 1),
    }
    print(f"{report.figures['gpu']}: {report.figures['copy_gb_per_s']} GB/s")
    engine = make_engine(folder, arguments.attention, most=max(sizes))
    rival = make_rival(folder, most=max(sizes))
    shape = shape_of(folder)
    report.figures["sizes"] = {}
    for size in sizes:
        figures = measure(engine, rival, shape, size, rounds=rounds, bytes_per_s=bytes_per_s)
        report.figures["sizes"][str(size)] = figures
        print(f"{size}: {figures}")
        report.require(f"over transformers at {size}", figures["over_rival"], at_least=LEAST_OVER_RIVAL)
    report.require("of the floor at 1", report.figures["sizes"]["1"]["of_floor"], at_least=LEAST_OF_BOUND)
    return report.finish()


def measure(
    engine: Engine, rival: Callable[[list[list[int]]], int], shape: Shape, size: int, *, rounds: int, bytes_per_s: float
) -> dict[str, Any]:
    """One batch size: whole answers in turns, then steps of decodes alone."""
    ours, theirs = [], []
    for number in range(rounds + 1):
        prompts = prompts_of(size, number)
        rates = [rate(lambda: answer(engine, prompts)), rate(lambda: rival(prompts))]  # noqa: B023 - run at once
        if number:  # the first time, kernels are compiled and memory is taken
            ours.append(rates[0])
            theirs.append(rates[1])
    step_s = decode_step_s(engine, prompts_of(size, rounds + 1))
    bound_s = shape.step_bytes(size, PROMPT_TOKENS + WARM_STEPS + STEPS // 2) / bytes_per_s
    return {
        "tokens_per_s": round(statistics.median(ours), 1),
        "rival_tokens_per_s": round(statistics.median(theirs), 1),
        "over_rival": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3),
        "step_ms": round(step_s * 1e3, 3),
        "floor_ms": round(bound_s * 1e3, 3),
        "of_floor": round(bound_s / step_s, 3),
    }


def copy_bytes_per_s() -> float:
    """How many bytes the GPU reads and writes in a second."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * COPIED_BYTES / best_s


def shape_of(folder: Path) -> Shape:
    """From the checkpoint: what is multiplied with, in bf16, and what a token's keys and values take."""
    from maitred.engine.models.config import ModelConfig
    from maitred.engine.models.kv_cache import KVCache

    config = ModelConfig.load(folder)
    rows = config.qkv_features + 3 * config.intermediate_size
    layer = rows * config.hidden_size + config.heads * config.head_dim * config.hidden_size
    weights = config.layers * layer + config.vocab_size * config.hidden_size
    return Shape(2 * weights, KVCache.bytes_per_block(config, 1, torch.bfloat16))


def make_engine(folder: Path, attention: AttentionKernels, *, most: int) -> Engine:
    """Ours, with graphs for every size that is measured."""
    config = EngineConfig(
        device="cuda",
        dtype="bf16",
        context_tokens=CONTEXT_TOKENS,
        max_sequences=most,
        step_tokens=8192,
        prefix_cache=False,
        gpu=GPUConfig(attention=attention, memory_fraction=0.4, graph_sequences=most),
    )
    return build(folder, config)[0]


def make_rival(folder: Path, *, most: int) -> Callable[[list[list[int]]], int]:
    """Transformers, with paged attention as the machine allows; answers all and counts their tokens."""
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="paged|sdpa", device_map="cuda"
    ).eval()
    page_tokens = 32
    pages = -(-(PROMPT_TOKENS + OUTPUT_TOKENS + page_tokens) // page_tokens)
    batching = ContinuousBatchingConfig(
        page_size=page_tokens, num_blocks=most * pages, max_batch_tokens=8192, max_requests_per_batch=most
    )
    greedy = GenerationConfig(max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    print(f"against Transformers {transformers.__version__}")

    def run(prompts: list[list[int]]) -> int:
        done = model.generate_batch(prompts, greedy, continuous_batching_config=batching)
        return sum(len(output.generated_tokens) for output in done.values())

    return run


def prompts_of(size: int, number: int) -> list[list[int]]:
    """Random prompts, others in every round."""
    generator = torch.Generator().manual_seed(SEED + number)
    return torch.randint(1000, 100_000, (size, PROMPT_TOKENS), generator=generator).tolist()


def rate(run: Callable[[], int]) -> float:
    """Tokens a second."""
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    tokens = run()
    torch.cuda.synchronize()
    return tokens / (time.perf_counter() - start_s)


def submit(engine: Engine, prompts: list[list[int]]) -> None:
    """Everything at once, greedily."""
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, seed=number, temperature=0.0, ignore_eos=True)
        engine.submit(None, EngineRequest(id=str(number), prompt=prompt, sampling=sampling))


def answer(engine: Engine, prompts: list[list[int]]) -> int:
    """Answers all; counts their tokens."""
    submit(engine, prompts)
    tokens = 0
    while engine.busy:
        tokens += sum(len(output.delta.tokens) for outputs in engine.step().values() for output in outputs)
    return tokens


def decode_step_s(engine: Engine, prompts: list[list[int]]) -> float:
    """The median of steps in which every sequence gets one token."""
    submit(engine, prompts)
    while engine.load().waiting_prompt_tokens:
        engine.step()
    took_s = []
    for _ in range(WARM_STEPS + STEPS):
        start_s = time.perf_counter()
        engine.step()  # waits for its tokens, and so for the GPU
        took_s.append(time.perf_counter() - start_s)
    engine.cancel_owner(None)
    return statistics.median(took_s[WARM_STEPS:])


if __name__ == "__main__":
    sys.exit(main())
