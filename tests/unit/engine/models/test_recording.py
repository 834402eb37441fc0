import torch

from maitred.engine.models.load import load_model
from tests.models import make_model
from tests.unit.engine.models.steps import Driver, random_tokens


def test_a_step_as_large_as_foreseen_computes_in_the_memory_that_was_taken_for_it(tmp_path):
    make_model(tmp_path, "llama")
    grown, reserved = (Driver(load_model(tmp_path, dtype=torch.float32).decoder) for _ in range(2))
    reserved.decoder.reserve(90, 2, reserved.cache)
    tokens = random_tokens(reserved.decoder.config, 93)
    lines = [(driver, driver.open(tokens)) for driver in (grown, reserved)]
    addresses = set()
    for length in (3, 90):
        expected, logits = (d.decoder.forward(d.batch([], [(line, length)]), d.cache) for d, line in lines)
        assert torch.equal(logits, expected)
        addresses.add(logits.data_ptr())
    assert len(addresses) == 1
