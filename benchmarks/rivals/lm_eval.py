"""lm-evaluation-harness scores a served model as it scores the same model by transformers.

``python -m benchmarks lm_eval install`` first installs the harness into an environment of its own, then
``python -m benchmarks lm_eval`` runs its tasks twice on the same folder of a model: with its `hf` (transformers, in
fp32 on the CPU) and with its `local-completions`, over HTTP at a server that is started here. The tasks are written by
this program: multiple choice and rolling log-likelihood, whose log-probabilities have to agree within 1e-3 for every
continuation and every text, and greedy generation, whose texts have to be the same. Over HTTP the harness leaves out
the token that begins a text, unless it is told not to.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.support.environments import CPU_TORCH, Environment
from benchmarks.support.installation import MODEL
from benchmarks.support.report import Report
from benchmarks.support.requirements import RequirementMissing
from maitred.config.tree import BUNDLED_MODEL
from maitred.testing.server_process import serving

SEED = 20261128
HARNESS = Environment(name="lm-eval", packages=("lm_eval[api,hf]==0.4.13", CPU_TORCH))
DOCUMENTS, QUICK_DOCUMENTS = 60, 4
CHOICES = 3
GENERATED_TOKENS = 24
MOST_DIFFERENCE = 1e-3
"""In natural log-probability of a whole continuation, or of a whole text."""
LIMIT_S = 3600.0
SUBJECTS = ("A fox", "The old man", "A river", "Seven birds", "The quiet girl", "My lamp", "Nobody", "The morning")
VERBS = ("lives in", "looked at", "was afraid of", "ran to", "remembers", "came from", "gave away", "wanted")
OBJECTS = ("the wood", "a table", "the sea", "his mother", "the red ball", "that stone", "a long story", "the town")
_TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {file}}}
test_split: train
output_type: {kind}
"""
_KINDS: Mapping[str, tuple[str, str]] = {
    "choice": (
        "multiple_choice",
        "doc_to_text: question\ndoc_to_choice: choices\ndoc_to_target: answer\n",
    ),
    "rolling": (
        "loglikelihood_rolling",
        'doc_to_text: ""\ndoc_to_target: text\nmetric_list: [{metric: word_perplexity}]\n',
    ),
    "generation": (
        "generate_until",
        "doc_to_text: question\ndoc_to_target: text\nmetric_list: [{metric: exact_match}]\n"
        f'generation_kwargs: {{until: ["\\n"], max_gen_toks: {GENERATED_TOKENS}, do_sample: false, temperature: 0}}\n',
    ),
}
"""Name of a task -> its kind, and the rest of its file."""


@dataclass(frozen=True)
class Samples:
    """Results of the harness with one backend.

    Attributes:
        choice: Log-probabilities of all continuations, and whether each is the greedy one.
        rolling: Log-probabilities of all texts.
        generation: Texts.
        accuracy: Of the multiple choice.
    """

    choice: Sequence[tuple[float, str]]
    rolling: Sequence[float]
    generation: Sequence[str]
    accuracy: float


def main() -> int:
    """Runs the benchmark, or installs what it needs; the exit code says whether every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=["install"], help="install the harness")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_DOCUMENTS} documents")
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="folder of a model")
    arguments = parser.parse_args()
    if arguments.action == "install":
        HARNESS.install()
        return 0
    if not HARNESS.installed:
        raise RequirementMissing("lm-evaluation-harness is not installed: python -m benchmarks lm_eval install")
    report = Report("lm_eval", seed=SEED, quick=arguments.quick)
    with TemporaryDirectory(prefix="maitred-lm-eval-") as name:
        compare(report, Path(name), arguments.model, QUICK_DOCUMENTS if arguments.quick else DOCUMENTS)
    return report.finish()


def compare(report: Report, folder: Path, model: Path, documents: int) -> None:
    """Runs the tasks with both backends, and compares sample by sample."""
    _write_tasks(folder, documents)
    of_transformers = _evaluated(folder, "hf", f"pretrained={model},dtype=float32", ["--device", "cpu"])
    with serving(str(model), settings={"model.served_name": MODEL}) as server:
        address = f"model={MODEL},base_url={server.url}/v1/completions,tokenizer={model},add_bos_token=True"
        of_server = _evaluated(folder, "local-completions", address, [])
    pairs = list(zip(of_transformers.choice, of_server.choice, strict=True))
    choice = max(abs(a - b) for (a, _), (b, _) in pairs)
    rolling = max(abs(a - b) for a, b in zip(of_transformers.rolling, of_server.rolling, strict=True))
    report.figures = {
        "harness": HARNESS.version,
        "model": model.name,
        "documents": documents,
        "continuations": len(pairs),
        "largest_difference": {"choice": choice, "rolling": rolling},
        "accuracy": {"hf": of_transformers.accuracy, "local-completions": of_server.accuracy},
    }
    print(report.figures, flush=True)
    report.require("log-probability of a continuation, largest difference", choice, at_most=MOST_DIFFERENCE)
    report.require("log-probability of a text, largest difference", rolling, at_most=MOST_DIFFERENCE)
    greedy = sum(a != b for (_, a), (_, b) in pairs)
    report.require("continuations that are greedy for one only", greedy, at_most=0)
    texts = sum(a != b for a, b in zip(of_transformers.generation, of_server.generation, strict=True))
    report.require("generated texts that differ", texts, at_most=0)


def _write_tasks(folder: Path, documents: int) -> None:
    rng = random.Random(SEED)

    def sentence() -> str:
        return f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}."

    made = [
        {
            "question": f"{sentence()} {rng.choice(SUBJECTS)} {rng.choice(VERBS)}",
            "choices": rng.sample(OBJECTS, k=CHOICES),
            "answer": rng.randrange(CHOICES),
            "text": " ".join(sentence() for _ in range(4)),
        }
        for _ in range(documents)
    ]
    file = folder / "documents.json"
    file.write_text(json.dumps(made))
    for name, (kind, rest) in _KINDS.items():
        (folder / f"{name}.yaml").write_text(_TASK.format(name=f"maitred_{name}", file=file, kind=kind) + rest)


def _evaluated(folder: Path, backend: str, model_arguments: str, further: Sequence[str]) -> Samples:
    """Runs all tasks with one backend of the harness."""
    output = folder / backend
    names = ",".join(f"maitred_{name}" for name in _KINDS)
    command = [
        *(str(HARNESS.python), "-m", "lm_eval", "run", "--model", backend, "--model_args", model_arguments),
        *("--include_path", str(folder), "--tasks", names, "--batch_size", "1", "--log_samples"),
        *("--output_path", str(output), *further),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "unused", "HF_HOME": str(folder / "cache")}
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **offline}, capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode:
        raise RuntimeError(f"lm_eval with {backend} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    samples = {name: _read_samples(output, f"maitred_{name}") for name in _KINDS}
    return Samples(
        choice=[(float(score), greedy) for each in samples["choice"] for ((score, greedy),) in each["resps"]],
        rolling=[_score(each["resps"]) for each in samples["rolling"]],
        generation=[each["resps"][0][0] for each in samples["generation"]],
        accuracy=math.fsum(each["acc"] for each in samples["choice"]) / len(samples["choice"]),
    )


def _read_samples(output: Path, task: str) -> list[dict[str, Any]]:
    (file,) = output.glob(f"**/samples_{task}_*.jsonl")
    lines = map(json.loads, file.read_text().splitlines())
    return sorted(lines, key=lambda sample: int(sample["doc_id"]))


def _score(answers: Any) -> float:  # noqa: ANN401 - nested once or twice, by the backend
    while isinstance(answers, list):
        answers = answers[0]
    return float(answers)


if __name__ == "__main__":
    sys.exit(main())
