"""What the log-probabilities of a prompt cost: its prefill with them, over the same prefill without.

A prompt is computed by the engine without them, with those of its own tokens, and with those of further tokens at each
position, in turns within one run. With them, the head of the model is computed for every row instead of for the last
one, and so is what follows the attention of the last layer. That is the least they can cost, and the shapes are chosen
by it: models of seven or eight billion parameters have 32 layers and a head of about a twelfth of them, as the first
shape; in models of one billion or less the head is up to a third, as in the second, for which there is no bar.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.support.report import Report
from benchmarks.support.shapes import LLAMA_33M, random_model
from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig
from maitred.engine.engine import Engine

SEED = 20261128
SHAPES: dict[str, dict[str, Any]] = {
    "a twelfth": {
        **LLAMA_33M,
        **{"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 32, "tie_word_embeddings": True},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    },
    "a third": {**LLAMA_33M, "num_hidden_layers": 4, "tie_word_embeddings": True},
}
"""Size of the head over that of the layers -> the model."""
BARRED = "a twelfth"
TOPS = (0, 1, 20)
"""Further tokens at each position."""
PROMPT_TOKENS = 512
ROUNDS, QUICK_ROUNDS = 24, 4
MOST = 1.15


def main() -> int:
    """Runs the benchmark; the exit code says whether every bar was met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sixth of the rounds")
    arguments = parser.parse_args()
    report = Report("prompt_logprobs", seed=SEED, quick=arguments.quick)
    for share, config in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            engine = engine_of(random_model(Path(folder), config, SEED))
            figures = measure(engine, config["vocab_size"], QUICK_ROUNDS if arguments.quick else ROUNDS)
        report.figures[share] = figures
        for top, over in figures["over_without"].items():
            print(f"head {share}, top {top}: {over:.3f} of {figures['without_ms']:.1f} ms")
            if share == BARRED:
                report.require(f"top {top}: prefill with log-probabilities over without", over, at_most=MOST)
    return report.finish()


def engine_of(folder: Path) -> Engine:
    """An engine on one thread, whose steps are as large as they are for nobody else."""
    config = EngineConfig(device="cpu", dtype="fp32", threads=1, kv_memory_bytes=64 << 20, max_sequences=8)
    return build(folder, config)[0]


def measure(engine: Engine, vocab_size: int, rounds: int) -> dict[str, Any]:
    """Prefills of new prompts, in turns; of the first round, which warms up, nothing is kept."""
    draw = random.Random(SEED)
    seconds: dict[int | None, list[float]] = {None: [], **{top: [] for top in TOPS}}
    for number in range(rounds + 1):
        for top, own in seconds.items():
            prompt = [draw.randrange(5, vocab_size) for _ in range(PROMPT_TOKENS)]
            took_s = prefill_s(engine, prompt, top)
            if number:
                own.append(took_s)
    without = seconds[None]
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "without_ms": round(1000 * statistics.median(without), 2),
        "over_without": {
            str(top): round(statistics.median(a / b for a, b in zip(seconds[top], without, strict=True)), 4)
            for top in TOPS
        },
    }


def prefill_s(engine: Engine, prompt: list[int], top: int | None) -> float:
    """Time from the arrival of a prompt to its first token."""
    sampling = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=top)
    began_s = time.perf_counter()
    engine.submit("benchmark", EngineRequest(id="prompt", prompt=prompt, sampling=sampling))
    while engine.occupied:
        engine.step()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    sys.exit(main())
