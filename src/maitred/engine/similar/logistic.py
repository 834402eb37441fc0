"""Logistic regression over standardised features, with weights for its rows and a ridge.

It is fitted by Newton's method (iteratively reweighted least squares), in milliseconds for a thousand rows.
"""

from dataclasses import dataclass

import numpy as np

from maitred.engine.similar.question import Floats

_STEPS = 25
_ENOUGH = 1e-8


@dataclass(frozen=True, slots=True)
class LogisticModel:
    """Logistic regression with the weights that were fitted to labels.

    Attributes:
        means: Mean of each feature.
        spreads: Standard deviation of each feature.
        weights: Weight of each standardised feature.
        bias: Log-odds at the means.
    """

    means: Floats
    spreads: Floats
    weights: Floats
    bias: float

    def log_odds(self, features: Floats) -> Floats:
        """Returns the log-odds of each row."""
        result: Floats = (features - self.means) / self.spreads @ self.weights + self.bias
        return result


def fit_logistic(
    features: Floats, labels: Floats, row_weights: Floats, *, standard: Floats, ridge: float
) -> LogisticModel:
    """Fits a logistic regression; the bias is not held back.

    Args:
        features: ``[rows, features]``
        labels: ``[rows]``: 0 or 1.
        row_weights: ``[rows]``: how much each row counts.
        standard: Rows by whose means and deviations features are standardised.
        ridge: Strength with which weights are held near 0.
    """
    means, spreads = standard.mean(0), standard.std(0) + 1e-6
    columns = np.hstack([(features - means) / spreads, np.ones((len(features), 1))])
    held = np.full(columns.shape[1], ridge)
    held[-1] = 1e-6
    weights = np.zeros(columns.shape[1])
    for _ in range(_STEPS):
        chances = 1 / (1 + np.exp(-np.clip(columns @ weights, -30, 30)))
        slope = columns.T @ (row_weights * (labels - chances)) - held * weights
        bend = (columns * (row_weights * chances * (1 - chances))[:, None]).T @ columns + np.diag(held)
        move = np.linalg.solve(bend, slope)
        weights = weights + move
        if np.abs(move).max() < _ENOUGH:
            break
    return LogisticModel(means, spreads, weights[:-1], float(weights[-1]))
