"""What a prompt looks like, and the score that is made of it."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.config.tree import BUNDLED_MODEL
from maitred.core.errors import ConfigInvalid
from maitred.routing.complexity import SURFACE_FEATURES, ComplexityModel, surface_features

BUNDLED = BUNDLED_MODEL.parent / "complexity.json"
CHOICE = "Which of the following is not a prime?\nA. 2\nB. 3\nC. 4\nD. 5\nAnswer:"


def model_of(weights, bias=0.0, dimensions=2):
    size = dimensions + len(SURFACE_FEATURES)
    padded = [*weights, *[0.0] * (size - len(weights))]
    return ComplexityModel(
        encoder="e", surface=SURFACE_FEATURES, means=[0.0] * size, spreads=[1.0] * size, weights=padded, bias=bias
    )


@given(st.text())
def test_every_text_has_a_number_for_each_feature(text):
    numbers = surface_features(text)
    assert len(numbers) == len(SURFACE_FEATURES)
    assert all(math.isfinite(number) for number in numbers)


def test_features_say_what_they_are_called():
    features = dict(zip(SURFACE_FEATURES, surface_features(CHOICE), strict=True))
    assert (features["options"], features["numeric_options"]) == (1.0, 1.0)
    assert features["negations"] == features["questions"] == math.log(2)
    plain = dict(zip(SURFACE_FEATURES, surface_features("Tell me a story about a fox"), strict=True))
    assert plain["options"] == plain["log_numbers"] == plain["symbols"] == plain["code"] == 0


def test_the_score_is_that_of_a_logistic_regression():
    vector = struct.pack("<2f", 0.5, -1.0)
    assert model_of([2.0, 1.0]).score("", vector) == pytest.approx(0.5)
    assert model_of([2.0, 0.0], bias=1.0).score("", vector) == pytest.approx(1 / (1 + math.exp(-2)))
    assert model_of([1e9]).score("", vector) <= 1.0


def test_an_embedding_of_another_length_is_refused():
    with pytest.raises((ValueError, struct.error)):
        model_of([1.0]).score("", struct.pack("<3f", 0, 0, 0))


def test_weights_survive_their_file(tmp_path):
    made = model_of([0.125, -3.5], bias=0.75)
    made.save(tmp_path / "weights.json")
    assert ComplexityModel.load(tmp_path / "weights.json") == made


def test_the_weights_that_come_with_maitred_can_be_used():
    model = ComplexityModel.load(BUNDLED)
    assert (model.encoder, model.embedding_dimensions) == ("all-MiniLM-L6-v2", 384)
    assert BUNDLED.stat().st_size < 1 << 20
    assert all(spread > 0 for spread in model.spreads)
    assert 0 < model.score(CHOICE, bytes(4 * 384)) < 1


OTHER = '{"encoder":"e","surface":["x"],"means":[],"spreads":[],"weights":[],"bias":0}'


@pytest.mark.parametrize("content", ["", "{}", OTHER])
def test_a_file_that_fits_no_features_is_refused(tmp_path, content):
    (tmp_path / "weights.json").write_text(content)
    with pytest.raises(ConfigInvalid):
        ComplexityModel.load(tmp_path / "weights.json")
