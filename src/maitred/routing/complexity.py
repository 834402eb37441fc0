"""Complexity of a prompt: the probability that a small model answers it wrong, from 0 to 1.

The length of a prompt has almost no relation to its complexity. The subject has a stronger relation, which a sentence
embedding captures; the way the prompt is written (options to choose from, statements to judge, numbers, negations) adds
the rest. A logistic regression over both is enough, and its few hundred multiplications are cheap even for a gateway
without NumPy.

The script ``benchmarks/routing/router_quality.py`` computes the weights and also reports their quality.
"""

import json
import math
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec

from maitred.core.errors import ConfigInvalid
from maitred.core.service import Vector

_OPTION = re.compile(r"^[^\S\n]*\(?[A-E][.)]\s+(.*)$", re.MULTILINE)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_SYMBOLS = re.compile(r"[=+*/^<>√∑∫π%$\\{}]")
_NEGATION = re.compile(r"\b(?:not|except|least|never|false|incorrect|neither)\b", re.IGNORECASE)
_STATEMENTS = re.compile(r"\b(?:statement|which of the following|scenario)\b", re.IGNORECASE)
_CODE = re.compile(r"```|\bdef \w+\(|\bclass \w+|;\s*$|\breturn\b", re.MULTILINE)

SURFACE_FEATURES = (
    "log_characters",
    "log_words",
    "word_length",
    "log_numbers",
    "digits",
    "symbols",
    "capitals",
    "negations",
    "statements",
    "questions",
    "commas",
    "lines",
    "options",
    "option_length",
    "numeric_options",
    "blanks",
    "code",
)
"""Names of the features that `surface_features` measures, in their order."""


def surface_features(text: str) -> list[float]:
    """Measures the way a prompt is written, independent of its subject.

    Returns one number for each name in `SURFACE_FEATURES`, most of them near 1.
    """
    words = text.split()
    options = _OPTION.findall(text)
    characters = max(1, len(text))
    return [
        math.log1p(len(text)),
        math.log1p(len(words)),
        sum(map(len, words)) / max(1, len(words)),
        math.log1p(len(_NUMBER.findall(text))),
        10 * sum(map(str.isdigit, text)) / characters,
        10 * len(_SYMBOLS.findall(text)) / characters,
        10 * sum(map(str.isupper, text)) / characters,
        math.log1p(len(_NEGATION.findall(text))),
        math.log1p(len(_STATEMENTS.findall(text))),
        math.log1p(text.count("?")),
        10 * text.count(",") / characters,
        math.log1p(text.count("\n")),
        len(options) / 4,
        math.log1p(sum(map(len, options)) / len(options)) if options else 0.0,
        sum(bool(_NUMBER.search(option)) for option in options) / len(options) if options else 0.0,
        math.log1p(text.count("__")),
        math.log1p(len(_CODE.findall(text))),
    ]


class ComplexityModel(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of a logistic regression over an embedding and `surface_features`, each standardised."""

    encoder: str
    """Encoder of the embeddings that the model was trained on; empty if the model uses none.

    Embeddings of another encoder have no meaning for the model.
    """
    surface: tuple[str, ...]
    means: list[float]
    """Means of the embedding's numbers, then of the surface features..."""
    spreads: list[float]
    """Standard deviations, in the same order as the means."""
    weights: list[float]
    bias: float

    @classmethod
    def load(cls, path: Path) -> "ComplexityModel":
        """Reads the weights from a file.

        Raises:
            ConfigInvalid: The weights cannot be read, or were made for other features.
        """
        try:
            model = msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as fault:
            raise ConfigInvalid(f"{path} holds no weights of a complexity model: {fault}.") from fault
        sizes = {len(model.means), len(model.spreads), len(model.weights)}
        if model.surface != SURFACE_FEATURES or len(sizes) != 1:
            raise ConfigInvalid(
                f"{path} was made for other features. Train it again (benchmarks/routing/router_quality.py)."
            )
        return model

    def save(self, path: Path) -> None:
        """Writes the weights to a file, with all significant digits."""
        fields = msgspec.to_builtins(self)
        for name in ("means", "spreads", "weights"):
            fields[name] = [float(f"{value:.5g}") for value in fields[name]]
        path.write_text(json.dumps(fields, separators=(",", ":")) + "\n", encoding="utf-8")

    @property
    def embedding_dimensions(self) -> int:
        """Number of dimensions of the embeddings that the model takes."""
        return len(self.weights) - len(SURFACE_FEATURES)

    def score(self, text: str, embedding: Vector) -> float:
        """Returns the probability that a small model answers the prompt wrong.

        Args:
            text: The prompt.
            embedding: Embedding of the prompt from `encoder`; empty if the model has no encoder.

        Raises:
            ValueError: The embedding has a wrong length.
        """
        return self.score_features(
            [*struct.unpack(f"<{self.embedding_dimensions}f", embedding), *surface_features(text)]
        )

    def score_features(self, features: Sequence[float]) -> float:
        """Returns the probability for features that the caller has computed."""
        columns = zip(features, self.means, self.spreads, self.weights, strict=True)
        logit = self.bias + math.fsum((value - mean) / spread * weight for value, mean, spread, weight in columns)
        return 1 / (1 + math.exp(-max(-30.0, min(30.0, logit))))
