"""Parity: every family of models, in every precision, with every feature, against `transformers`.

Small random models of each family answer the same prompts, greedily. Two things are held against each other:

* **agrees**: the answers of the plain engine in fp32 against `transformers.generate` in fp32: the same tokens. In
  other precisions the mean share of an answer before its first different token, which random weights make small: the
  accuracy of a scheme on a real model is in `benchmarks.engine.quantisation`.
* **same**: with a feature, against the plain engine in the same precision: always the same tokens. That the feature
  was in use is checked, too: prefixes found, prompts cut, sequences preempted, guesses right. Answers that are held to
  a grammar (letters and spaces) are others, so these are compared with those of one request at a time; in fp32 with
  those of `transformers`, which is left no other tokens; in bf16 with those of another engine.

Nothing is timed here, so the machine does not matter.
"""

import argparse
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from msgspec.structs import replace
from torch import Tensor

from benchmarks.support.families import FAMILIES, make_model
from benchmarks.support.report import Report
from benchmarks.support.shapes import BUNDLED
from maitred.core.grammar import Grammar
from maitred.core.replica import LoadReport
from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig, SpeculationConfig
from maitred.engine.device import PrecisionPlan
from maitred.engine.engine import Engine
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.kv_cache import KVCache
from maitred.text.tokenizer import Tokenizer

SEED = 20261122
VOCABULARY = 4096
REQUESTS, OUTPUT_TOKENS, CONTEXT_TOKENS = 12, 48, 160
COMMON = EngineConfig(device="cpu", threads=1, block_tokens=8, kv_memory_bytes=16 << 20, context_tokens=CONTEXT_TOKENS)
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "int8": {"quantization": "int8"},
    "int8_weight_only": {"quantization": "int8_weight_only"},
    "int4": {"quantization": "int4"},
    "int4_weight_only": {"quantization": "int4_weight_only"},
    "fp32, KV in bf16": {"dtype": "fp32", "kv_dtype": "bf16"},
    "fp32, KV in int8": {"dtype": "fp32", "kv_dtype": "int8"},
    "int8, KV in int8": {"quantization": "int8", "kv_dtype": "int8"},
}
LETTERS = "[a-z ]*"

Answers = list[list[int]]


@dataclass(frozen=True)
class Feature:
    """Something that must not change an answer.

    Attributes:
        settings: Of the engine that has it.
        used: How often it was, by the engine's own report.
        twice: The second time that everything is asked counts.
        resumed: Another engine goes on with what the plain one has begun.
        scarce: The engine has blocks for a few requests only.
    """

    settings: Mapping[str, Any]
    used: Callable[[LoadReport], float]
    twice: bool = False
    resumed: bool = False
    scarce: bool = False


FEATURES = {
    "prefix": Feature({"prefix_cache": True}, lambda load: load.cached_tokens, twice=True),
    "chunk": Feature({"step_tokens": 16, "max_sequences": 8}, lambda load: load.steps),
    "preempt": Feature({}, lambda load: load.preemptions, scarce=True),
    "continue": Feature({}, lambda load: load.output_tokens, resumed=True),
}
SPECULATION = Feature({"speculation": SpeculationConfig(method="ngram")}, lambda load: load.drafted_tokens)
FEW = 64
"""Tokens of a vocabulary with which random answers repeat themselves, so that there is something to guess."""


def main() -> int:
    """Runs the benchmark; the exit code says whether everything is the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two families")
    arguments = parser.parse_args()
    # Within an answer, `transformers` changes from longrope's factors for short texts to those for long ones.
    families = [family for family in FAMILIES if family != "phi3_longrope"][: 2 if arguments.quick else None]
    report = Report("parity", seed=SEED, quick=arguments.quick)
    different = unused = guesses = 0
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            table = rows(Path(folder), family)
        report.figures[family] = table
        for precision, cells in table.items():
            print(f"{family:13} {precision:18}", cells, flush=True)
            different += sum(cell["same"] < 1.0 for cell in cells.values() if isinstance(cell, dict))
            unused += sum(not cells[name]["used"] for name in (*FEATURES, "grammar"))
            guesses += cells["speculate"]["used"]  # made only where steps are measured to be worth it
    report.require(
        "least agreement of fp32 with transformers",
        min(figure["fp32"]["agrees"] for figure in report.figures.values()),
        at_least=1.0,
    )
    report.require("cells that differ", different, at_most=0)
    report.require("cells whose feature was not in use", unused, at_most=0)
    report.require("guesses at tokens to come", guesses, at_least=1)
    return report.finish()


def rows(folder: Path, family: str) -> dict[str, dict[str, Any]]:
    """The table of one family: by precision, by feature."""
    oracle = make_model(folder, family, vocab_size=VOCABULARY)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder / name)
    small = folder / "small"
    make_model(small, family, vocab_size=FEW)
    asked, repeating = requests(VOCABULARY), requests(FEW)
    truth = [generated(oracle, request, None) for request in asked]
    letters = letters_of(folder)
    lettered = [generated(oracle, request, letters) for request in asked]
    table: dict[str, dict[str, Any]] = {}
    for precision, settings in PRECISIONS.items():
        config = replace(COMMON, **settings)
        plain = answers(engine_of(folder, replace(config, prefix_cache=False)), asked)
        cells: dict[str, Any] = {"agrees": round(agreement(plain, truth), 4)}
        for name, feature in FEATURES.items():
            cells[name] = cell(folder, config, feature, asked, plain)
        plain = answers(engine_of(small, replace(config, prefix_cache=False)), repeating)
        cells["speculate"] = cell(small, config, SPECULATION, repeating, plain)
        cells["grammar"] = constrained(folder, config, asked, letters, lettered if precision == "fp32" else None)
        table[precision] = cells
    return table


def cell(
    folder: Path, config: EngineConfig, feature: Feature, asked: Sequence[EngineRequest], plain: Answers
) -> dict[str, Any]:
    """What becomes of the same requests with a feature."""
    config = replace(config, **feature.settings)
    engine = engine_of(folder, replace(config, kv_memory_bytes=scarce(folder, config)) if feature.scarce else config)
    if feature.resumed:
        halves = [answer[: len(answer) // 2] for answer in plain]
        asked = [replace(request, resumes={0: half}) for request, half in zip(asked, halves, strict=True)]
        got = [half + rest for half, rest in zip(halves, answers(engine, asked), strict=True)]
    else:
        got = answers(engine, asked)
        if feature.twice:
            got = answers(engine, asked)
    load = engine.load()
    assert load.free_blocks == load.total_blocks, "blocks were lost"
    return {"same": sum(a == b for a, b in zip(got, plain, strict=True)) / len(plain), "used": feature.used(load)}


def constrained(
    folder: Path, config: EngineConfig, asked: Sequence[EngineRequest], letters: Tensor, truth: Answers | None
) -> dict[str, Any]:
    """What becomes of the same requests when their answers are held to a grammar: together, and one at a time."""
    grammar = Grammar("regex", LETTERS)
    asked = [replace(request, sampling=replace(request.sampling, grammar=grammar)) for request in asked]
    engine = engine_of(folder, config)
    together = answers(engine, asked)
    if truth is not None:
        expected = truth
    elif config.dtype == "bf16":  # whose rows are not computed independently of each other
        expected = answers(engine_of(folder, config), asked)
    else:
        expected = [answers(engine_of(folder, config), [request])[0] for request in asked]
    allowed = set(letters.nonzero().flatten().tolist())
    return {
        "same": sum(a == b for a, b in zip(together, expected, strict=True)) / len(expected),
        "used": sum(len(answer) == OUTPUT_TOKENS and allowed.issuperset(answer) for answer in together),
    }


def letters_of(folder: Path) -> Tensor:
    """Which tokens are nothing but letters and spaces: ``[VOCABULARY]``."""
    tokenizer = Tokenizer.load(folder)
    texts = [tokenizer.decode([token]) for token in range(VOCABULARY)]
    return torch.tensor([bool(text and re.fullmatch(LETTERS, text)) for text in texts])


def scarce(folder: Path, config: EngineConfig) -> int:
    """Bytes of a KV cache that is too small for all requests together, and large enough for one of any length."""
    kv_dtype = PrecisionPlan.of(config, torch.device("cpu")).kv_dtype
    block_bytes = KVCache.bytes_per_block(ModelConfig.load(folder), config.block_tokens, kv_dtype)
    return (CONTEXT_TOKENS // config.block_tokens + 4) * block_bytes


def engine_of(folder: Path, config: EngineConfig) -> Engine:
    """An engine in this process."""
    return build(folder, config)[0]


def answers(engine: Engine, asked: Sequence[EngineRequest]) -> Answers:
    """What it answers to all of them together."""
    tokens: dict[str, list[int]] = {request.id: [] for request in asked}
    for request in asked:
        engine.submit(None, request)
    while engine.occupied:  # also while a grammar is being compiled, and nothing runs
        for outputs in engine.step().values():
            for output in outputs:
                tokens[output.request_id] += output.delta.tokens
    return list(tokens.values())


def requests(vocabulary: int) -> list[EngineRequest]:
    """Prompts of all lengths, many of which begin alike."""
    rng = random.Random(SEED)
    beginning = rng.choices(range(10, vocabulary), k=40)
    return [
        EngineRequest(
            str(number),
            beginning[: rng.choice((0, 0, 20, 40))] + rng.choices(range(10, vocabulary), k=rng.randint(1, 60)),
            SamplingParams(max_tokens=OUTPUT_TOKENS, seed=number, temperature=0.0, ignore_eos=True),
        )
        for number in range(REQUESTS)
    ]


def generated(oracle: "transformers.PreTrainedModel", request: EngineRequest, allowed: Tensor | None) -> list[int]:
    """What `transformers` answers, if it may use only some tokens."""
    prompt = torch.tensor([request.prompt])

    def masked(_: Tensor, scores: Tensor) -> Tensor:
        return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)

    loaded: Any = oracle
    with torch.inference_mode():
        whole = loaded.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=OUTPUT_TOKENS,
            min_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=[masked],
        )
    answer: list[int] = whole[0, len(request.prompt) :].tolist()
    return answer


def agreement(one: Answers, other: Answers) -> float:
    """The mean part of an answer before its first token that differs."""
    alike = [
        next((k for k, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        for a, b in zip(one, other, strict=True)
    ]
    return sum(alike) / (len(alike) * OUTPUT_TOKENS)


if __name__ == "__main__":
    sys.exit(main())
