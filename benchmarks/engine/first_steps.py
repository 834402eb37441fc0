"""How well an engine predicts its first steps, with the ones that it has tried when it started and without.

Two engines run the same model and answer the same requests, step by step in turns: one alone, then eight more at once,
then sixteen more. The one has tried some steps when its model was loaded for the first time (`engine.bake_off`), the
other learns from what it is asked for. Before each step both say what it will take. What a gateway tells the first
client comes of the same numbers: the time of the first step that computes its prompt.
"""

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.support.report import Report
from benchmarks.support.shapes import BUNDLED, random_llama, random_qwen
from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig
from maitred.engine.engine import Engine
from maitred.engine.scheduler.step_times import StepWork
from maitred.engine.weights_cache.config import WeightsCacheConfig

SEED = 20261122
WAVES = (1, 8, 16)
STEPS_BETWEEN = 12
SPANS = {"1-4": slice(0, 4), "5-16": slice(4, 16), "17-48": slice(16, 48)}


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the bundled model alone, two rounds")
    arguments = parser.parse_args()
    report = Report("first_steps", seed=SEED, quick=arguments.quick)
    cases = [("bundled", BUNDLED, "none")]
    if not arguments.quick:
        small, large = random_llama(), random_qwen()
        cases += [("33M", small, "none"), ("33M", small, "int8"), ("0.5B", large, "none"), ("0.5B", large, "int8")]
    for name, folder, scheme in cases:
        figures = Case(folder, scheme).run(rounds=1 if name == "0.5B" else 2 if arguments.quick else 5)
        report.figures[f"{name} {scheme}"] = figures
        print(f"{name} {scheme}: {figures}", flush=True)
        # Both are wrong when other work takes the processor; how much less the one is does not depend on that.
        ratio = figures["tried"]["1-4"] / figures["off"]["1-4"]
        report.require(f"{name} {scheme}: error of steps 1-4 over that without trials", ratio, at_most=0.75)
    return report.finish()


class Case:
    """A model in a precision.

    Args:
        folder: The checkpoint.
        scheme: `engine.quantization`.
    """

    def __init__(self, folder: Path, scheme: Any) -> None:  # noqa: ANN401 - a literal
        self._folder = folder
        self._scheme = scheme

    def run(self, rounds: int) -> dict[str, Any]:
        """Median error of the predictions, relative to what was measured, by the steps' numbers; seconds of starts."""
        errors: dict[str, dict[str, list[float]]] = {kind: {span: [] for span in SPANS} for kind in ("tried", "off")}
        first_s, again_s = [], []
        with tempfile.TemporaryDirectory() as cache:
            self._build(cache, "off")  # the weights are kept from here on
            for number in range(rounds):
                shutil.rmtree(Path(cache, "steps"), ignore_errors=True)
                plain, plain_s = self._build(cache, "off")
                first_s.append(self._build(cache, "auto")[1] - plain_s)
                tried, noted_s = self._build(cache, "auto")
                again_s.append(noted_s - plain_s)
                for kind, own in answer({"tried": tried, "off": plain}, random.Random(SEED + number)).items():
                    for span, steps in SPANS.items():
                        errors[kind][span] += own[steps]
        medians = {
            kind: {span: round(statistics.median(values), 3) for span, values in spans.items()}
            for kind, spans in errors.items()
        }
        return medians | {
            "first_start_s": round(statistics.median(first_s), 3),
            "later_starts_s": round(statistics.median(again_s), 3),
        }

    def _build(self, cache: str, bake_off: Any) -> tuple[Engine, float]:  # noqa: ANN401 - a literal
        config = EngineConfig(
            device="cpu",
            quantization=self._scheme,
            max_sequences=32,
            kv_memory_bytes=1 << 28,
            context_tokens=2048,
            step_tokens=256,
            bake_off=bake_off,
            weights_cache=WeightsCacheConfig(folder=cache),
        )
        began_s = time.perf_counter()
        engine = build(self._folder, config)[0]
        return engine, time.perf_counter() - began_s


def answer(engines: dict[str, Engine], draw: random.Random) -> dict[str, list[float]]:
    """Has all of them answer the same requests; the errors of what each predicted of its steps."""
    errors = {kind: watched(engine) for kind, engine in engines.items()}
    arrivals = {STEPS_BETWEEN * wave: count for wave, count in enumerate(WAVES)}
    longest = max(span.stop for span in SPANS.values())
    made = 0
    for step in range(longest + 1):
        for _ in range(arrivals.get(step, 0)):
            made += 1
            prompt = [draw.randrange(4000) for _ in range(draw.choice((24, 60, 120, 240)))]
            for engine in engines.values():
                sampling = SamplingParams(max_tokens=longest, seed=made, ignore_eos=True)
                engine.submit("benchmark", EngineRequest(str(made), prompt, sampling))
        for engine in engines.values():
            engine.step()
            engine._record(time.monotonic())  # what the other takes meanwhile is no part of a step
    return errors


def watched(engine: Engine) -> list[float]:
    """The errors of an engine's predictions, relative to what was measured; they come as its steps do."""
    scheduler, errors = engine._scheduler, list[float]()
    measured = scheduler.on_step_time

    def compare(work: StepWork, seconds: float) -> None:
        errors.append(abs(work.seconds(scheduler.times) / seconds - 1))
        measured(work, seconds)

    scheduler.on_step_time = compare  # type: ignore[method-assign]
    return errors


if __name__ == "__main__":
    sys.exit(main())
