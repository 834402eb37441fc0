"""Verifier: judges whether a cached question has the same answer as the one that was asked, learnt from labels.

Three things are learnt from a deployment's own questions, and none of it is of use to another one:

- a logistic regression over `maitred.engine.similar.features`;
- where it went wrong before: which parts of the space of questions mix answers up. Each labelled pair is remembered by
  the vector half-way between its questions; the share of false pairs around a new one, weighted by kernels of three
  widths, makes three more features (its own label left out in training). They halve the errors, which lie close
  together;
- what a minimal edit is: pairs of a question and itself with two words exchanged or one replaced
  (`maitred.engine.similar.edits`) are further false pairs. They need no label, and without them the verifier takes most
  swaps of arguments for paraphrases, since it hardly ever meets one among real questions.
"""

import hashlib

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from maitred.engine.similar.features import FEATURE_VERSION, FEATURES, TokenWeights, pair_features
from maitred.engine.similar.logistic import LogisticModel, fit_logistic
from maitred.engine.similar.question import Floats, QuestionPair

MIN_LABELS = 500
"""Labels below which plain cosine does better."""
EDIT_SHARE = 0.1
"""Weight of all edits together, as a part of that of all labels."""
_RIDGE = 20.0
_KERNEL_WIDTHS = (0.02, 0.05, 0.12)
"""Distances, in cosine, at which a remembered pair counts 1/e: one feature for each."""
_PRIOR_PAIRS = 3.0
_PRIOR_DISTANCE = 0.3
"""So many remembered pairs so far away, with the mean share of errors, count with all others."""


class VerifierRecord(Struct, frozen=True, kw_only=True):
    """Weights of a verifier, as they are stored.

    Attributes:
        encoder: Digest of the encoder whose vectors it judges.
        feature_version: Version of the features.
        means: Of each feature, the shares of errors nearby last.
        spreads: Standard deviation of each feature.
        weights: Weight of each feature.
        bias: Log-odds of a pair with the mean of all features.
        frequencies: Number of questions with each token.
        questions: Number of questions in which tokens were counted.
        middles: Half-precision vectors of the labelled pairs, one behind the other.
        same: One byte for each labelled pair: whether its answers were the same.
    """

    encoder: str
    feature_version: int
    means: list[float]
    spreads: list[float]
    weights: list[float]
    bias: float
    frequencies: dict[int, int]
    questions: int
    middles: bytes
    same: bytes


class Verifier:
    """Verifier that was trained, or loaded.

    Attributes:
        version: Names the encoder, the features and the weights; a certification belongs to one version.
        token_weights: Weights of tokens in the features.
    """

    def __init__(self, record: VerifierRecord) -> None:
        self._data = msgspec.msgpack.encode(record)
        digest = hashlib.sha256(self._data).hexdigest()[:16]
        self.version = f"{record.encoder}:{record.feature_version}:{digest}"
        self.token_weights = TokenWeights(record.frequencies, record.questions)
        self._model = LogisticModel(
            np.array(record.means), np.array(record.spreads), np.array(record.weights), record.bias
        )
        self._same = np.frombuffer(record.same, dtype=np.uint8).astype(np.float64)
        self._middles = np.frombuffer(record.middles, dtype=np.float16).reshape(len(self._same), -1).astype(np.float32)

    @classmethod
    def load(cls, data: bytes, encoder: str) -> "Verifier":
        """Loads a verifier from its stored weights.

        Raises:
            ValueError: It is broken, or was trained for another encoder or other features.
        """
        try:
            record = msgspec.msgpack.decode(data, type=VerifierRecord)
        except msgspec.MsgspecError as fault:
            raise ValueError(f"These are no weights of a verifier: {fault}.") from fault
        if record.encoder != encoder or record.feature_version != FEATURE_VERSION:
            raise ValueError("These weights were trained for another encoder or other features. Train again.")
        if {len(record.means), len(record.spreads), len(record.weights)} != {len(FEATURES) + len(_KERNEL_WIDTHS)}:
            raise ValueError("These weights of a verifier have a wrong number of features.")
        return cls(record)

    def to_bytes(self) -> bytes:
        """Returns the weights to be stored."""
        return self._data

    def score(self, pairs: list[QuestionPair]) -> Floats:
        """Returns the log-odds that each pair has the same answer."""
        features = np.array([pair_features(pair, self.token_weights) for pair in pairs])
        return self.score_features(features, np.array([pair.middle for pair in pairs]))

    def score_features(self, features: Floats, middles: Floats) -> Floats:
        """Returns the log-odds for pairs whose features are known.

        Args:
            features: ``[pairs, features]``, as of `pair_features`.
            middles: ``[pairs, dimensions]``: vectors half-way between the questions of each pair.
        """
        nearby = _errors_nearby(_cosines(middles, self._middles), self._same)
        return self._model.log_odds(np.hstack([features, nearby]))


def train_verifier(
    labelled: tuple[Floats, Floats],
    same: NDArray[np.bool_],
    edits: tuple[Floats, Floats],
    *,
    encoder: str,
    token_weights: TokenWeights,
) -> Verifier:
    """Trains a verifier with labelled pairs and unlabelled edits.

    Args:
        labelled: Features and middles of labelled pairs, as for `Verifier.score_features`.
        same: Whether the answers of each labelled pair were the same.
        edits: Features and middles of pairs of a question and a minimal edit of it; there may be none.
        encoder: Digest of the encoder.
        token_weights: Weights of tokens with which the features were measured.

    Raises:
        ValueError: There are too few labels, or all are the same.
    """
    if len(same) < MIN_LABELS or same.all() or not same.any():
        raise ValueError(f"A verifier needs at least {MIN_LABELS} labels, true and false ones.")
    features, middles = labelled
    # As it will be stored, so that training and use agree.
    kept = middles.astype(np.float16)
    known = same.astype(np.float64)
    cosines = _cosines(kept, kept)
    np.fill_diagonal(cosines, -np.inf)
    rows = np.hstack([features, _errors_nearby(cosines, known)])
    edit_features, edit_middles = edits
    edit_rows = np.hstack([edit_features, _errors_nearby(_cosines(edit_middles, kept), known)])
    count = len(edit_rows)
    model = fit_logistic(
        np.concatenate([rows, edit_rows]),
        np.concatenate([known, np.zeros(count)]),
        np.concatenate([np.ones(len(rows)), np.full(count, min(1.0, EDIT_SHARE * len(rows) / max(1, count)))]),
        standard=rows,
        ridge=_RIDGE,
    )
    return Verifier(
        VerifierRecord(
            encoder=encoder,
            feature_version=FEATURE_VERSION,
            means=model.means.tolist(),
            spreads=model.spreads.tolist(),
            weights=model.weights.tolist(),
            bias=model.bias,
            frequencies=dict(token_weights.frequencies),
            questions=token_weights.questions,
            middles=kept.tobytes(),
            same=same.astype(np.uint8).tobytes(),
        )
    )


def _cosines(middles: Floats, remembered: Floats) -> Floats:
    """Returns how similar each pair is to each remembered pair."""
    return middles.astype(np.float32) @ remembered.astype(np.float32).T


def _errors_nearby(cosines: Floats, same: Floats) -> Floats:
    """Returns the logarithms of false pairs over true pairs nearby, which tend to the mean far from all.

    Args:
        cosines: ``[pairs, remembered]``; minus infinity leaves a remembered pair out.
        same: ``[remembered]``: 1 where the answers were the same, else 0.

    Returns:
        ``[pairs, widths]``
    """
    false_share = 1.0 - float(same.mean())
    columns = []
    for width in _KERNEL_WIDTHS:
        counts = np.exp((cosines - 1.0) / width).astype(np.float64)
        prior = _PRIOR_PAIRS * np.exp(-_PRIOR_DISTANCE / width)
        false, true = counts @ (1.0 - same) + prior * false_share, counts @ same + prior * (1.0 - false_share)
        columns.append(np.log(false / true))
    return np.column_stack(columns)
