import dataclasses

import pytest
import torch

from maitred.engine.kernels.linear import ScreenedLinear
from maitred.engine.models.decoder import Decoder
from maitred.engine.models.load import load_model
from tests.support.models import make_model
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


@pytest.mark.parametrize("scheme", ["none", "int8"])
def test_rows_whose_logits_are_not_wanted_change_nothing(tmp_path, scheme):
    """Neither the logits of those that are, in whatever order, nor what later steps read in the cache."""
    make_model(tmp_path, "llama")
    decoder = load_model(tmp_path, dtype=torch.float32, scheme=scheme).decoder
    tokens = random_tokens(decoder.config, 40)
    few, all_rows = Driver(decoder), Driver(decoder)
    lines = [driver.open(tokens) for driver in (few, all_rows)]
    batches = [driver.batch([], [(line, 39)]) for driver, line in zip((few, all_rows), lines, strict=True)]
    batches[0].logit_rows, batches[1].logit_rows = torch.tensor([38, 3, 17]), torch.arange(39)
    wanted = decoder.forward(batches[0], few.cache).clone()
    assert torch.equal(wanted, decoder.forward(batches[1], all_rows.cache)[[38, 3, 17]])
    assert torch.equal(few.step([lines[0]], []), all_rows.step([lines[1]], []))


def test_a_step_of_which_no_logits_are_wanted_fills_the_cache(tmp_path):
    make_model(tmp_path, "llama")
    driver = Driver(load_model(tmp_path, dtype=torch.float32).decoder)
    tokens = random_tokens(driver.decoder.config, 9)
    line, other = driver.open(tokens), driver.open(tokens)
    silent = driver.batch([], [(line, 8)])
    silent.logit_rows = torch.tensor([], dtype=torch.int64)
    assert len(driver.decoder.forward(silent, driver.cache)) == 0
    driver.step([], [(other, 8)])
    assert torch.equal(driver.step([line], []), driver.step([other], []))


def test_greedy_steps_search_a_large_head_and_all_others_compute_it(tmp_path, monkeypatch):
    make_model(tmp_path, "llama", vocab_size=1 << 10)
    monkeypatch.setattr("maitred.engine.kernels.linear.screened.WORTH_WEIGHTS", 1)
    searching = load_model(tmp_path, dtype=torch.float32).decoder
    if not isinstance(searching._weights.head, ScreenedLinear):
        pytest.skip("the layout of this processor's weights is not known")
    plain = Driver(Decoder(searching.config, searching._weights, searching._attention))
    searching = Driver(searching)
    tokens = random_tokens(plain.decoder.config, 24)
    lines = [driver.open(tokens) for driver in (plain, searching)]
    left_out = 0
    for length in (9, *[1] * 15):
        batches = [driver.batch([], [(line, length)]) for driver, line in zip((plain, searching), lines, strict=True)]
        batches[1] = dataclasses.replace(batches[1], greedy=True)
        expected, logits = (d.decoder.forward(b, d.cache) for d, b in zip((plain, searching), batches, strict=True))
        left = logits == float("-inf")
        assert torch.equal(torch.where(left, expected, logits), expected)
        assert torch.equal(logits.argmax(1), expected.argmax(1))
        left_out += int(left.sum())
    assert left_out
