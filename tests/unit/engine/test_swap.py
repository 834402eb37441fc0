"""An engine whose cache is far too small: with its blocks swapped, without, and with room for all."""

import pytest
import torch

from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig
from maitred.engine.device import ComputeDevice
from tests.support.models import make_model


def answers(folder, target, **settings):
    config = EngineConfig(
        device="cpu", dtype="fp32", threads=1, block_tokens=4, step_tokens=64, max_sequences=32, **settings
    )
    engine, _ = build(folder, config, target=target)
    engine._scheduler._state._requeue = lambda sequence: sequence.computed >= 4  # whatever copying takes here
    for number in range(32):
        sampling = SamplingParams(max_tokens=80, seed=number, temperature=number % 2, ignore_eos=True)
        prompt = [4 + (number * 7 + position) % 120 for position in range(20 + number)]
        engine.submit("test", EngineRequest(id=str(number), prompt=prompt, sampling=sampling))
    tokens: dict[str, list[int]] = {}
    while engine.busy:
        for output in engine.step().get("test", []):
            tokens.setdefault(output.request_id, []).extend(output.delta.tokens)
    load = engine.load()
    assert load.free_blocks == load.total_blocks
    return tokens, load


@pytest.mark.parametrize(
    "target", [None, ComputeDevice(torch.device("cpu"), accelerated=True)], ids=["cpu", "accelerated"]
)
def test_answers_are_the_same_and_less_is_computed_twice(tmp_path, target):
    make_model(tmp_path, "llama3")
    expected, plenty = answers(tmp_path, target, kv_memory_bytes=8 << 20)
    assert plenty.preemptions == 0
    small = {"kv_memory_bytes": 1 << 20, "context_tokens": 256}
    recomputed, without = answers(tmp_path, target, **small)
    assert without.preemptions > 0
    assert without.recomputed_tokens > 0
    swapped, with_swap = answers(tmp_path, target, **small, swap_bytes=4 << 20)
    assert recomputed == swapped == expected
    assert with_swap.restored_blocks > 0
    assert with_swap.recomputed_tokens < without.recomputed_tokens / 2
