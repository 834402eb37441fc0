"""The logistic regression."""

import numpy as np
import pytest

from maitred.engine.similar.logistic import fit_logistic

SOURCE = np.random.default_rng(5)
FEATURES = SOURCE.normal(size=(4_000, 3)) * [1.0, 5.0, 1.0] + [0.0, 3.0, 0.0]
TRUE = np.array([1.5, -0.4, 0.0])
LABELS = (SOURCE.random(4_000) < 1 / (1 + np.exp(-(FEATURES @ TRUE + 0.7)))).astype(float)
ONES = np.ones(4_000)


def fitted(labels=LABELS, weights=ONES, ridge=0.01):
    return fit_logistic(FEATURES, labels, weights, standard=FEATURES, ridge=ridge)


def test_it_finds_the_weights_that_made_the_labels():
    model = fitted()
    assert model.weights / model.spreads == pytest.approx(TRUE, abs=0.15)
    assert model.log_odds(FEATURES).mean() == pytest.approx((FEATURES @ TRUE + 0.7).mean(), abs=0.2)


def test_a_ridge_holds_weights_back_but_not_the_bias():
    held = fitted(ridge=1e9)
    assert np.abs(held.weights).max() < 1e-3
    assert held.bias == pytest.approx(np.log(LABELS.mean() / (1 - LABELS.mean())), abs=1e-3)


def test_a_row_of_weight_two_is_as_good_as_two_rows():
    weights = ONES.copy()
    weights[:100] = 2.0
    doubled = fit_logistic(
        np.concatenate([FEATURES, FEATURES[:100]]),
        np.concatenate([LABELS, LABELS[:100]]),
        np.ones(4_100),
        standard=FEATURES,
        ridge=0.01,
    )
    assert fitted(weights=weights).weights == pytest.approx(doubled.weights, abs=1e-6)


def test_separable_labels_have_finite_weights():
    assert np.isfinite(fitted(labels=(FEATURES[:, 0] > 0).astype(float), ridge=1.0).weights).all()
