"""Output tokens per second of the engine against `transformers`, on the same weights, interleaved in one run.

Three ways to answer the same requests, all greedy in fp32 on the same threads:

* ``one`` — `transformers.generate`, one request at a time: what a single-user prototype does;
* ``static`` — `transformers.generate` over all requests as one padded batch. Every request has the same lengths here,
  so nothing is padded and nothing waits for the longest: static batching at its best;
* ``engine`` — maitred's engine with its scheduler, in this process, with all requests submitted at once.

Beside them the cost of a decode step against its floor: `F.linear` over the same matrices at the same number of rows,
and nothing else. Rounds alternate between the three, so a machine that slows down slows all of them.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.support.report import Report
from benchmarks.support.shapes import BUNDLED, linear_shapes, random_qwen
from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig

SEED = 20260101
STEP_WARM_UP = 3
SIZE, QUICK_SIZE = (64, 4), (16, 4)
"""Output tokens of a request to the bundled model, and requests of a measurement one at a time."""


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="bundled model only, short answers, one round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", choices=["bundled", "qwen2.5-0.5b"], default=["bundled", "qwen2.5-0.5b"])
    arguments = parser.parse_args()
    report = Report("throughput", seed=SEED, quick=arguments.quick)
    report.figures["threads"] = arguments.threads
    if arguments.quick or "bundled" in arguments.shapes:
        output_tokens, one_requests = QUICK_SIZE if arguments.quick else SIZE
        bench = Bench(BUNDLED, arguments.threads, prompt_tokens=64, output_tokens=output_tokens)
        concurrencies = [1, 32] if arguments.quick else [1, 8, 32, 128]
        rounds = 1 if arguments.quick else arguments.rounds + 1
        figures = bench.run(concurrencies, rounds=rounds, one_requests=one_requests)
        report.figures["bundled"] = figures
        report.require("bundled: engine at 32 / one at a time", figures["32"]["engine_over_one"], at_least=8)
        report.require("bundled: floor / decode step at 32", figures["32"]["floor_over_step"], at_least=0.5)
        bench.close()
    if not arguments.quick and "qwen2.5-0.5b" in arguments.shapes:
        bench = Bench(random_qwen(), arguments.threads, prompt_tokens=64, output_tokens=32)
        figures = bench.run([1, 8, 32, 128], rounds=arguments.rounds, one_requests=1, once=[128])
        report.figures["qwen2.5-0.5b"] = figures
        report.require("0.5B shape: engine at 32 / one at a time", figures["32"]["engine_over_one"], at_least=4)
        report.require("0.5B shape: floor / decode step at 32", figures["32"]["floor_over_step"], at_least=0.5)
        bench.close()
    return report.finish()


class Bench:
    """One model, loaded once in `transformers` and once in the engine."""

    def __init__(self, folder: Path, threads: int, *, prompt_tokens: int, output_tokens: int) -> None:
        from transformers import AutoModelForCausalLM

        config = EngineConfig(
            device="cpu",
            dtype="fp32",
            threads=threads,
            kv_memory_bytes=2 << 30,
            prefix_cache=False,
            context_tokens=1024,
        )
        self.folder = folder
        self.engine, self.card = build(folder, config)
        self.rival: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.random = random.Random(SEED)
        self.matrices = [
            torch.randn(shape.outputs, shape.inputs) for shape in linear_shapes(folder) for _ in range(shape.count)
        ]
        """As many as the model has: one matrix used over and over would sit in the processor's cache."""
        torch.set_num_threads(threads)

    def close(self) -> None:
        """Lets both copies go."""
        del self.engine, self.rival, self.matrices
        gc.collect()

    def run(
        self, concurrencies: list[int], *, rounds: int, one_requests: int, once: Collection[int] = ()
    ) -> dict[str, Any]:
        """Figures by concurrency.

        Args:
            concurrencies: Requests at once.
            rounds: How often everything is measured, in turns.
            one_requests: Requests of a measurement one at a time.
            once: Concurrencies that take minutes and are measured in the first round only.
        """
        self._engine_rate(2), self._rival_rate(2, batch=1)
        samples: list[dict[int, list[float]]] = [{c: [] for c in concurrencies} for _ in range(5)]
        one, static, engine, steps, bounds = samples
        for number in range(rounds):
            for concurrency in concurrencies:
                if number and concurrency in once:
                    continue
                one[concurrency].append(self._rival_rate(one_requests, batch=1))
                engine[concurrency].append(self._engine_rate(concurrency))
                static[concurrency].append(self._rival_rate(concurrency, batch=concurrency))
                step_s, bound_s = self._step_and_bound_s(concurrency)
                steps[concurrency].append(step_s)
                bounds[concurrency].append(bound_s)
        return {
            str(c): self._figures(one[c], static[c], engine[c], steps[c], bounds[c], concurrency=c)
            for c in concurrencies
        }

    def _figures(
        self,
        one: list[float],
        static: list[float],
        engine: list[float],
        steps: list[float],
        bounds: list[float],
        *,
        concurrency: int,
    ) -> dict[str, float]:
        middle = statistics.median
        figures = {
            "one_tokens_per_s": middle(one),
            "static_tokens_per_s": middle(static),
            "engine_tokens_per_s": middle(engine),
            "engine_over_one": middle([e / o for e, o in zip(engine, one, strict=True)]),
            "engine_over_static": middle([e / s for e, s in zip(engine, static, strict=True)]),
            "decode_step_ms": middle(steps) * 1e3,
            "floor_ms": middle(bounds) * 1e3,
            "floor_over_step": middle([f / s for f, s in zip(bounds, steps, strict=True)]),
        }
        figures = {name: round(value, 3) for name, value in figures.items()}
        print(self.folder.name, concurrency, figures, flush=True)
        return figures

    def _prompt(self) -> list[int]:
        return [self.random.randrange(10, self.card.vocab_size) for _ in range(self.prompt_tokens)]

    def _submit(self, count: int, output_tokens: int) -> None:
        for number in range(count):
            sampling = SamplingParams(max_tokens=output_tokens, seed=number, temperature=0.0, ignore_eos=True)
            self.engine.submit(None, EngineRequest(id=str(number), prompt=self._prompt(), sampling=sampling))

    def _engine_rate(self, concurrency: int) -> float:
        self._submit(concurrency, self.output_tokens)
        tokens, start_s = 0, time.perf_counter()
        while self.engine.busy:
            tokens += sum(len(outputs) for outputs in self.engine.step().values())
        assert tokens == concurrency * self.output_tokens
        return tokens / (time.perf_counter() - start_s)

    def _rival_rate(self, requests: int, *, batch: int) -> float:
        tokens, start_s = 0, time.perf_counter()
        for _ in range(requests // batch):
            prompts = torch.tensor([self._prompt() for _ in range(batch)])
            with torch.inference_mode():
                answer = self.rival.generate(
                    prompts,
                    attention_mask=torch.ones_like(prompts),
                    do_sample=False,
                    min_new_tokens=self.output_tokens,
                    max_new_tokens=self.output_tokens,
                    pad_token_id=0,
                )
            tokens += answer.shape[0] * (answer.shape[1] - self.prompt_tokens)
        assert tokens == requests * self.output_tokens
        return tokens / (time.perf_counter() - start_s)

    def _step_and_bound_s(self, rows: int, *, samples: int = 7) -> tuple[float, float]:
        """A whole decode step of the engine, and the matrices' multiplications alone, taken in turn."""
        inputs = {weight.shape[1]: torch.randn(rows, weight.shape[1]) for weight in self.matrices}
        self._submit(rows, 200)
        while sum(map(len, self.engine.step().values())) < rows:
            pass  # until every row is a decode
        for _ in range(STEP_WARM_UP):
            self.engine.step()
        step_s, bound_s = [], []
        for _ in range(samples):
            start_s = time.perf_counter()
            outputs = self.engine.step()
            step_s.append(time.perf_counter() - start_s)
            assert sum(map(len, outputs.values())) == rows
            start_s = time.perf_counter()
            with torch.inference_mode():
                for weight in self.matrices:
                    functional.linear(inputs[weight.shape[1]], weight)
            bound_s.append(time.perf_counter() - start_s)
        self.engine.cancel_owner(None)
        return statistics.median(step_s), statistics.median(bound_s)


if __name__ == "__main__":
    sys.exit(main())
