"""What a step's kernels cost, beside torch's plain matrix products over the same shapes.

The yardstick is ``F.linear`` alone, once per weight of the model: a step that computes attention, norms and rotations
too, and still costs less, has kernels that pay. Everything of one case is measured in turns, and the least of all
rounds counts, since other work on the machine only ever adds. With one thread it is CPU time, with more wall time.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.support.report import Report
from maitred.engine.kernels.cpu import CPUAttention
from maitred.engine.kernels.linear import make_linear
from maitred.engine.models.batch import BatchChunk, ForwardBatch
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.decoder import Decoder
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.weights import LayerWeights, Weights

SEED = 20260105
BLOCK_TOKENS = 16
SHAPES = {
    "bundled": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        layers=5,
        heads=8,
        kv_heads=4,
        head_dim=32,
        context_tokens=2048,
        norm_epsilon=1e-5,
        tied_embeddings=True,
    ),
    "Qwen2.5-0.5B": ModelConfig(
        architecture="Qwen2ForCausalLM",
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        context_tokens=2048,
        norm_epsilon=1e-6,
        qkv_bias=True,
        tied_embeddings=True,
    ),
}
PREFILLS = {
    "16 chunks of 32": [(0, 32)] * 16,
    "1 chunk of 512": [(0, 512)],
    "16 chunks of 17 to 32 after 100 to 250": [(100 + 10 * i, 17 + i) for i in range(16)],
}
"""(context before, length) of each chunk."""
STEP_BAR = 2.0
BUDGET_S, QUICK_BUDGET_S = 2.0, 0.5
"""Of each case."""


def main() -> int:
    """Runs the benchmark; the exit code says whether every bar was met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds")
    arguments = parser.parse_args()
    report = Report("kernels", seed=SEED, quick=arguments.quick)
    torch.manual_seed(SEED)
    budget_s = QUICK_BUDGET_S if arguments.quick else BUDGET_S
    row_counts = (1, 32) if arguments.quick else (1, 8, 32, 128)
    decodes: list[dict[str, object]] = []
    prefills: list[dict[str, object]] = []
    for name, config in SHAPES.items():
        bench = Bench(config, max_rows=max(row_counts))
        for threads in (1, 2):
            torch.set_num_threads(threads)
            bench.use_threads(threads)
            for rows in row_counts:
                figures = least_ms(bench.decode(rows), threads, budget_s)
                ratio = figures["step"] / figures["plain linears"]
                decodes.append({"shape": name, "threads": threads, "rows": rows, "ratio": ratio, "ms": figures})
                show(f"{name}, {threads} threads, {rows} decodes (step/linears {ratio:.2f})", figures)
                if rows == 32:
                    report.require(f"{name} {threads}t step/linears", ratio, at_most=STEP_BAR)
            for case, chunks in PREFILLS.items():
                figures = least_ms(bench.prefill(chunks), threads, budget_s / 2)
                prefills.append({"shape": name, "threads": threads, "chunks": case, "ms": figures})
                show(f"{name}, {threads} threads, {case}, one layer", figures)
    report.figures = {"decode": decodes, "prefill": prefills}
    return report.finish()


def show(title: str, figures: dict[str, float]) -> None:
    """One line per case."""
    print(f"{title}: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in figures.items()), flush=True)


def least_ms(parts: dict[str, Callable[[], object]], threads: int, budget_s: float) -> dict[str, float]:
    """Least time of each part, measured in turns for about `budget_s` seconds (at least three rounds)."""
    clock = time.process_time if threads == 1 else time.perf_counter
    least = dict.fromkeys(parts, float("inf"))
    until_s = time.perf_counter() + budget_s
    rounds = 0
    with torch.inference_mode():
        for part in parts.values():
            part()
        while rounds < 3 or time.perf_counter() < until_s:
            for name, part in parts.items():
                before_s = clock()
                part()
                least[name] = min(least[name], (clock() - before_s) * 1e3)
            rounds += 1
    return least


@dataclass(frozen=True)
class Plain:
    """The weights as torch takes them."""

    layers: list[list[Tensor]]
    head: Tensor


class Bench:
    """A model of random weights with a cache of random contents.

    Args:
        config: Its shape.
        max_rows: Most sequences in a step.
    """

    def __init__(self, config: ModelConfig, max_rows: int) -> None:
        self._config = config
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = config.heads * config.head_dim
        sizes = [(config.qkv_features, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)]
        # Few distinct layers, used in turns: enough that no cache holds them all.
        distinct = [[torch.randn(*size) * 0.02 for size in sizes] for _ in range(min(config.layers, 6))]
        self._plain = Plain(
            [distinct[i % len(distinct)] for i in range(config.layers)], torch.randn(config.vocab_size, hidden)
        )
        gain, bias = torch.ones(hidden), torch.zeros(config.qkv_features) if config.qkv_bias else None
        packed = [
            LayerWeights(
                attention_norm=gain,
                qkv=make_linear(qkv, bias),
                head_norm=None,
                attention_output=make_linear(output),
                mlp_norm=gain,
                gate_up=make_linear(gate_up),
                down=make_linear(down),
            )
            for qkv, output, gate_up, down in distinct
        ]
        layers = [packed[i % len(packed)] for i in range(config.layers)]
        self._weights = Weights(self._plain.head.bfloat16(), layers, gain, make_linear(self._plain.head))
        blocks = 20 * max(max_rows, 20)
        self._cache = KVCache(config, blocks, BLOCK_TOKENS, torch.float32, "cpu")
        self._half_cache = KVCache(config, blocks, BLOCK_TOKENS, torch.bfloat16, "cpu")
        for cache in (self._cache, self._half_cache):
            for layer in (*cache.keys, *cache.values):
                layer.normal_()

    def use_threads(self, threads: int) -> None:
        """Shares the decodes of a step over that many threads from now on."""
        self._attention = CPUAttention(self._config, threads)
        self._decoder = Decoder(self._config, self._weights, self._attention)
        self._half_decoder = Decoder(self._config, self._weights, CPUAttention(self._config, threads))

    def decode(self, rows: int) -> dict[str, Callable[[], object]]:
        """A step of single tokens after contexts of 100 to 300."""
        config = self._config
        lengths = torch.linspace(100, 300, rows).int()
        tables = torch.randperm(self._cache.num_blocks)[: rows * 19].view(rows, 19).int()
        last_blocks = tables[torch.arange(rows), (lengths - 1) // BLOCK_TOKENS].long()
        batch = ForwardBatch(
            token_ids=torch.randint(config.vocab_size, (rows,)),
            positions=lengths.long() - 1,
            slots=last_blocks * BLOCK_TOKENS + (lengths.long() - 1) % BLOCK_TOKENS,
            logit_rows=torch.arange(rows),
            num_decodes=rows,
            decode_tables=tables,
            decode_lengths=lengths,
        )
        inputs = {width: torch.randn(rows, width) for width in (config.hidden_size, config.intermediate_size)}
        inputs[config.heads * config.head_dim] = torch.randn(rows, config.heads * config.head_dim)

        def plain_linears() -> None:
            for layer in self._plain.layers:
                for weight in layer:
                    functional.linear(inputs[weight.shape[1]], weight)
            functional.linear(inputs[config.hidden_size], self._plain.head)

        def packed_linears() -> None:
            for layer, sizes in zip(self._weights.layers, self._plain.layers, strict=True):
                for linear, weight in zip(
                    (layer.qkv, layer.attention_output, layer.gate_up, layer.down), sizes, strict=True
                ):
                    linear(inputs[weight.shape[1]])
            self._weights.head(inputs[config.hidden_size])

        qkv = torch.randn(rows, config.qkv_features)

        def attention() -> None:
            plan = self._attention.plan(batch, self._cache)
            for layer in range(config.layers):
                self._attention.attend(layer, qkv, self._cache, plan)

        return {
            "plain linears": plain_linears,
            "packed linears": packed_linears,
            "attention": attention,
            "step": lambda: self._decoder.forward(batch, self._cache),
            "step, bf16 cache": lambda: self._half_decoder.forward(batch, self._half_cache),
        }

    def prefill(self, sizes: list[tuple[int, int]]) -> dict[str, Callable[[], object]]:
        """One layer's attention over chunks, all chunks at once and one after the other."""
        chunks, start = [], 0
        for before, length in sizes:
            table = torch.randperm(self._cache.num_blocks)[: -(-(before + length) // BLOCK_TOKENS)].tolist()
            chunks.append(BatchChunk(start, length, before, table))
            start += length
        config = self._config
        qkv = torch.randn(start, config.qkv_features)

        def batch_of(part: list[BatchChunk]) -> ForwardBatch:
            first, last = part[0].start_row, part[-1].end_row
            rows = torch.arange(last - first)
            moved = [BatchChunk(c.start_row - first, c.length, c.context_before, c.block_table) for c in part]
            return ForwardBatch(rows, rows, rows, rows, chunks=moved)

        def attend(part: list[BatchChunk]) -> None:
            batch = batch_of(part)
            rows = qkv[part[0].start_row : part[-1].end_row]
            self._attention.attend(0, rows, self._cache, self._attention.plan(batch, self._cache))

        def one_by_one() -> None:
            for chunk in chunks:
                attend([chunk])

        return {"at once": lambda: attend(chunks), "one by one": one_by_one}


if __name__ == "__main__":
    sys.exit(main())
