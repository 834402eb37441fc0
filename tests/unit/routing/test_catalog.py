"""Names of models."""

import pytest

from maitred.core.errors import ModelNotFound
from maitred.core.tenancy import ANONYMOUS
from maitred.routing.catalog import Catalog, ServedModel


def catalog(*names):
    return Catalog([ServedModel(name, None, None) for name in names])


def test_the_exact_name_and_no_other():
    models = catalog("Qwen2.5-0.5B", "tiny")
    assert models.resolve("tiny", ANONYMOUS).name == "tiny"
    with pytest.raises(ModelNotFound) as error:
        models.resolve("tiney", ANONYMOUS)
    assert error.value.param == "model"
    assert (
        error.value.message == "The model 'tiney' is not served here. Did you mean 'tiny'? Served: Qwen2.5-0.5B, tiny."
    )


def test_a_name_that_is_like_none_gets_no_guess():
    with pytest.raises(ModelNotFound) as error:
        catalog("tiny").resolve("gpt-4o" * 1000, ANONYMOUS)
    assert "Did you mean" not in error.value.message
    assert len(error.value.message) < 400
