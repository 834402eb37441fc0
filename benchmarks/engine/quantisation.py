"""What rounding weights and the KV cache costs in accuracy, and what it gains in time and memory.

Accuracy is the bundled model's, against itself in fp32: perplexity on text that it was not trained on, the share of
positions of that text at which both find the same token the likeliest, and how long two greedy answers stay the same.
Time is that of one step of decodes in the shape of Qwen2.5-0.5B with random weights (eight distinct layers, used in
turns: more than the caches hold), all schemes in turns within one run.
"""

import argparse
import lzma
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.engine.kernels import BLOCK_TOKENS, SHAPES
from benchmarks.support.report import Report
from benchmarks.support.shapes import BUNDLED
from maitred.engine.config import Quantization
from maitred.engine.kernels.cpu import CPUAttention
from maitred.engine.kernels.linear import Linear, make_linear
from maitred.engine.models.batch import BatchChunk, ForwardBatch
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.decoder import Decoder
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.load import LoadedModel, load_model
from maitred.engine.models.weights import LayerWeights, Weights

SEED = 20261122
SCHEMES: tuple[Quantization, ...] = ("none", "int8", "int8_weight_only", "int4", "int4_weight_only")
KV_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
WINDOW = 512
WINDOWS, QUICK_WINDOWS = 16, 4
SECONDS, QUICK_SECONDS = 60.0, 8.0
"""For the steps."""
HELD_OUT = 0.03
"""Of the plays; `scripts/tiny_model` keeps the last 4 % from the model."""
ANSWERS, ANSWER_TOKENS, PROMPT_TOKENS = 32, 64, 64
CONTEXT = 160
"""Tokens of each sequence in a timed step."""
ROWS = (1, 8, 32, 128)
LAYERS = 8
SHAPE = "Qwen2.5-0.5B"
"""Of the timed model, of `benchmarks.engine.kernels`."""


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less text; steps of two layers and a small vocabulary")
    parser.add_argument(
        "--data", type=Path, help="tinyshakespeare.txt.xz; without it, text that the model draws itself"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    report = Report("quantisation", seed=SEED, quick=arguments.quick)
    accuracies = accuracy_of_all(arguments.data, windows=QUICK_WINDOWS if arguments.quick else WINDOWS)
    steps = Steps(quick=arguments.quick).run(seconds=QUICK_SECONDS if arguments.quick else SECONDS)
    report.figures = {"threads": arguments.threads, "accuracy": accuracies, "steps": steps}
    perplexity = {(row["weights"], row["kv"]): row["perplexity_ratio"] for row in accuracies}
    for scheme, most in (("int8", 1.01), ("int8_weight_only", 1.01), ("int4", 1.05), ("int4_weight_only", 1.05)):
        report.require(f"{scheme}: perplexity over fp32", perplexity[scheme, "fp32"], at_most=most)
    report.require("int8 KV: perplexity over fp32", perplexity["none", "int8"], at_most=1.01)
    if not arguments.quick:
        report.require("int8, 1 row: time over fp32", steps["int8"]["1"]["over_fp32"], at_most=0.45)
        report.require("int8, 32 rows: time over fp32", steps["int8"]["32"]["over_fp32"], at_most=0.55)
        report.require("int4, 1 row: time over int8", steps["int4"]["1"]["ms"] / steps["int8"]["1"]["ms"], at_most=0.8)
    return report.finish()


def accuracy_of_all(data: Path | None, *, windows: int) -> list[dict[str, Any]]:
    """Every scheme with every type of KV cache, against fp32."""
    exact = load_model(BUNDLED, dtype=torch.float32)
    tokens = held_out(data, windows) if data else drawn(exact, windows)
    rows: list[dict[str, Any]] = []
    best = answers = None
    for scheme in SCHEMES:
        model = load_model(BUNDLED, dtype=torch.float32, scheme=scheme)
        for kv, kv_type in KV_TYPES.items():
            logits = over(model, tokens, kv_type)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            likeliest, own = logits.argmax(-1), greedy(model, tokens, kv_type)
            if best is None or answers is None:
                best, answers, exact_loss = likeliest, own, loss
            rows.append(
                {
                    "weights": scheme,
                    "kv": kv,
                    "perplexity": round(math.exp(loss), 4),
                    "perplexity_ratio": round(math.exp(loss - exact_loss), 5),
                    "same_token": round(float((likeliest == best).float().mean()), 4),
                    "answers_begin_alike_tokens": round(
                        float((own == answers).int().cumprod(1).sum(1).float().mean()), 1
                    ),
                    "linear_bytes": sum(sizes(model)),
                    "kv_bytes_per_token": KVCache.bytes_per_block(model.config, 1, kv_type),
                }
            )
            print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    return rows


def sizes(model: LoadedModel) -> list[int]:
    """Bytes of each linear's tensors; of MKL's, the weight itself, since what it leaves untouched takes no memory."""
    config, counted = model.config, []
    weights = model.decoder._weights
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.heads * config.head_dim
    shapes = [(config.qkv_features, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)]
    for layer in weights.layers:
        linears = (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
        counted += [size(linear, *shape) for linear, shape in zip(linears, shapes, strict=True)]
    return [*counted, size(weights.head, config.vocab_size, hidden)]


def size(linear: Linear, outputs: int, inputs: int) -> int:
    """Of one."""
    if linear.kind == "packed":
        return 4 * outputs * inputs
    return sum(tensor.nbytes for tensor in linear.tensors().values())


def held_out(path: Path, windows: int) -> Tensor:
    """The end of the plays: int64 ``[windows, WINDOW]``."""
    text = lzma.decompress(path.read_bytes()).decode()
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    ids = tokenizer.encode(text[-int(len(text) * HELD_OUT) :], add_special_tokens=False).ids
    if len(ids) < windows * WINDOW:
        windows = len(ids) // WINDOW
    return torch.tensor(ids[: windows * WINDOW]).view(windows, WINDOW)


def drawn(model: LoadedModel, windows: int) -> Tensor:
    """What the exact model writes when its tokens are drawn."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.zeros(windows, 1, dtype=torch.int64)
    return decoded(
        model,
        ids,
        torch.float32,
        WINDOW - 1,
        lambda logits: torch.multinomial(logits.softmax(-1), 1, generator=generator),
    )


def greedy(model: LoadedModel, tokens: Tensor, kv_type: torch.dtype) -> Tensor:
    """What the model answers to pieces of the text: ``[ANSWERS, ANSWER_TOKENS]``."""
    prompts = tokens.flatten()[: tokens.numel() // PROMPT_TOKENS * PROMPT_TOKENS].view(-1, PROMPT_TOKENS)[:ANSWERS]
    with_answers = decoded(model, prompts, kv_type, ANSWER_TOKENS, lambda logits: logits.argmax(-1, keepdim=True))
    return with_answers[:, PROMPT_TOKENS:]


def decoded(model: LoadedModel, prompts: Tensor, kv_type: torch.dtype, count: int, choose: Any) -> Tensor:  # noqa: ANN401
    """The prompts, and `count` more tokens of each, one at a time."""
    sequences, length = prompts.shape
    blocks = -(-(length + count) // BLOCK_TOKENS)
    cache = KVCache(model.config, sequences * blocks, BLOCK_TOKENS, kv_type, "cpu")
    tables = torch.arange(sequences * blocks).view(sequences, blocks)
    tokens = prompts
    for row, prompt in enumerate(prompts):
        if length > 1:
            model.decoder.forward(chunk(prompt[:-1], tables[row]), cache)
    for position in range(length - 1, length + count - 1):
        logits = model.decoder.forward(decodes(tokens[:, -1], position, tables), cache)
        tokens = torch.cat((tokens, choose(logits)), dim=1)
    return tokens


def over(model: LoadedModel, tokens: Tensor, kv_type: torch.dtype) -> Tensor:
    """Logits of every position of every window, whose keys and values go through the cache."""
    blocks = torch.arange(WINDOW // BLOCK_TOKENS)
    logits = []
    for window in tokens:
        cache = KVCache(model.config, len(blocks), BLOCK_TOKENS, kv_type, "cpu")
        logits.append(model.decoder.forward(chunk(window, blocks, every=True), cache))
    return torch.stack(logits)


def chunk(tokens: Tensor, table: Tensor, *, every: bool = False) -> ForwardBatch:
    """The beginning of one sequence; logits of every position, or of the last."""
    positions = torch.arange(len(tokens))
    return ForwardBatch(
        token_ids=tokens,
        positions=positions,
        slots=table[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS,
        logit_rows=positions if every else positions[-1:],
        chunks=[BatchChunk(0, len(tokens), 0, table.tolist())],
    )


def decodes(tokens: Tensor, position: int, tables: Tensor) -> ForwardBatch:
    """One more token of every sequence, all at the same position."""
    rows = len(tokens)
    return ForwardBatch(
        token_ids=tokens,
        positions=torch.full((rows,), position),
        slots=tables[:, position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS,
        logit_rows=torch.arange(rows),
        num_decodes=rows,
        decode_tables=tables.int(),
        decode_lengths=torch.full((rows,), position + 1, dtype=torch.int32),
    )


class Steps:
    """Steps of decodes of a large model, under every scheme.

    Args:
        quick: Two layers and a small vocabulary.
    """

    def __init__(self, *, quick: bool) -> None:
        shape = SHAPES[SHAPE]
        layers, vocabulary = (2, 8192) if quick else (shape.layers, shape.vocab_size)
        fields = {name: getattr(shape, name) for name in shape.__struct_fields__}
        self._config = ModelConfig(**fields | {"layers": layers, "vocab_size": vocabulary})
        self._rows = (1, 32) if quick else ROWS
        torch.manual_seed(SEED)
        config, hidden, inner = self._config, shape.hidden_size, shape.intermediate_size
        sizes = [(config.qkv_features, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
        self._plain = [[torch.randn(*size) * 0.02 for size in sizes] for _ in range(min(layers, LAYERS))]
        self._table = torch.randn(vocabulary, hidden).mul_(0.02)
        self._attention = CPUAttention(config)
        self._cases: dict[str, tuple[Decoder, str]] = {scheme: (self._decoder(scheme), "fp32") for scheme in SCHEMES}
        self._cases["int8, int8 KV"] = self._cases["int8"][0], "int8"
        blocks = max(self._rows) * -(-CONTEXT // BLOCK_TOKENS)
        self._caches = {name: KVCache(config, blocks, BLOCK_TOKENS, KV_TYPES[name], "cpu") for name in ("fp32", "int8")}
        for layer in self._caches["fp32"].keys:
            layer.normal_()
        for layer in self._caches["fp32"].values:
            layer.normal_()
        for scales in (self._caches["int8"].key_scales, self._caches["int8"].value_scales):
            scales.fill_(0.02)
        for entries in (self._caches["int8"].keys, self._caches["int8"].values):
            entries.random_(-127, 128)

    def _decoder(self, scheme: Quantization) -> Decoder:
        gain, bias = torch.ones(self._config.hidden_size), torch.zeros(self._config.qkv_features)
        distinct = [
            LayerWeights(
                gain,
                make_linear(qkv, bias, scheme),
                None,
                make_linear(output, None, scheme),
                gain,
                make_linear(gate_up, None, scheme),
                make_linear(down, None, scheme),
            )
            for qkv, output, gate_up, down in self._plain
        ]
        layers = [distinct[index % len(distinct)] for index in range(self._config.layers)]
        weights = Weights(self._table, layers, gain, make_linear(self._table, None, scheme))
        return Decoder(self._config, weights, self._attention)

    def run(self, *, seconds: float) -> dict[str, Any]:
        """Milliseconds of a step: the least of all rounds, which take every case in turn."""
        least: dict[str, dict[str, float]] = {case: {} for case in self._cases}
        batches = {rows: self._batch(rows) for rows in self._rows}
        for rows, batch in batches.items():
            until_s, rounds = time.perf_counter() + seconds / len(batches), 0
            while rounds < 3 or time.perf_counter() < until_s:
                for case, (decoder, cache) in self._cases.items():
                    before_s = time.perf_counter()
                    decoder.forward(batch, self._caches[cache])
                    took_ms = (time.perf_counter() - before_s) * 1e3
                    least[case][str(rows)] = min(took_ms, least[case].get(str(rows), math.inf))
                rounds += 1
            print(f"{rows} rows: " + ", ".join(f"{case} {times[str(rows)]:.1f} ms" for case, times in least.items()))
        exact = least["none"]
        return {
            case: {rows: {"ms": round(ms, 2), "over_fp32": round(ms / exact[rows], 3)} for rows, ms in times.items()}
            for case, times in least.items()
        }

    def _batch(self, rows: int) -> ForwardBatch:
        blocks = -(-CONTEXT // BLOCK_TOKENS)
        tables = torch.randperm(rows * blocks).view(rows, blocks)
        return decodes(torch.randint(self._config.vocab_size, (rows,)), CONTEXT - 1, tables)


if __name__ == "__main__":
    sys.exit(main())
