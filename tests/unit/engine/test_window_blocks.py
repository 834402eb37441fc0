"""Engines whose layers have windows: what they answer, whatever happens to their blocks, and what their crowds hold."""

import pytest
import torch

from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig, SpeculationConfig
from maitred.engine.kv.blocks import BlockPool, WindowPool
from maitred.engine.kv.plan import BlockSize, count_blocks, plan_kv
from maitred.engine.models.config import ModelConfig
from tests.support.models import make_model
from tests.support.schedulers import make_scheduler

REQUESTS = [
    EngineRequest(
        id=str(number),
        prompt=[4 + (number % 5 * 7 + position * (1 + number % 3)) % 120 for position in range(5 + 9 * number)],
        sampling=SamplingParams(max_tokens=64, seed=number, temperature=0.0, ignore_eos=True),
    )
    for number in range(10)
]
"""Prompts of up to 86 tokens, some with common beginnings; windows have 20 and 24."""


@pytest.fixture(scope="module", params=["gemma3", "mistral_window", "gemma2", "smollm3_window"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_model(folder, request.param)


def answers(folder, *, passes=1, **settings):
    config = EngineConfig(
        **{"device": "cpu", "dtype": "fp32", "threads": 1, "block_tokens": 4, "step_tokens": 32, "max_sequences": 16}
        | {"guests": 0, "kv_memory_bytes": 16 << 20, "bake_off": "off"}
        | settings
    )
    engine, _ = build(folder, config)
    engine._scheduler._state._requeue = lambda sequence: sequence.computed >= 4  # whatever copying takes here
    window = engine._scheduler.pool.window
    assert window is not None
    for _ in range(passes):
        tokens: dict[str, list[int]] = {}
        for request in REQUESTS:
            engine.submit("test", request)
        while engine.busy:
            for output in engine.step().get("test", []):
                tokens.setdefault(output.request_id, []).extend(output.delta.tokens)
    load = engine.load()
    assert load.free_blocks == load.total_blocks
    assert window.pool.idle == window.pool.total
    return tokens, load


def is_greedy(oracle, tokens) -> bool:
    """Whether each answer has the tokens that the library finds the likeliest at each of their positions."""
    for request in REQUESTS:
        whole = request.prompt + tokens[request.id]
        with torch.inference_mode():
            best = oracle(torch.tensor([whole])).logits[0].argmax(-1).tolist()
        if tokens[request.id] != best[len(request.prompt) - 1 : -1]:
            return False
    return True


def test_answers_are_those_of_the_library_whatever_happens_to_blocks(model):
    folder, oracle = model
    expected, plenty = answers(folder)
    assert is_greedy(oracle, expected)
    assert all(len(tokens) == 64 for tokens in expected.values())
    assert plenty.preemptions == 0
    small = {"kv_memory_bytes": _bytes_for(folder, 60), "context_tokens": 200}
    preempted, scarce = answers(folder, **small)
    assert preempted == expected
    assert scarce.preemptions > 0
    swapped, with_swap = answers(folder, **small, swap_bytes=4 << 20)
    assert swapped == expected
    assert with_swap.restored_blocks > 0
    again, reused = answers(folder, passes=2)
    assert again == expected
    assert reused.cached_tokens > sum(len(request.prompt) for request in REQUESTS) // 2
    drafted, guessed = answers(folder, speculation=SpeculationConfig(method="ngram"))
    assert drafted == expected
    assert guessed.preemptions == 0


def _bytes_for(folder, blocks: int) -> int:
    """Memory of so many blocks, in as many of which all layers are."""
    model = ModelConfig.load(folder)
    return blocks * 2 * model.layers * model.kv_heads * model.head_dim * 4 * 4


MODEL = ModelConfig(
    architecture="Gemma3ForCausalLM",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=64,
    layers=6,
    heads=4,
    kv_heads=2,
    head_dim=16,
    context_tokens=2048,
    norm_epsilon=1e-5,
    windows=(512, 512, 512, 512, 512, 0),
)
LAYER = 2 * 2 * 16 * 4 * 16
"""Bytes of a block in a layer."""


def test_a_crowd_on_an_interleaved_model_holds_a_part_of_the_memory():
    """Of 128 answers with texts of 2,000 tokens, five layers of six with a window of 512."""
    config = EngineConfig(max_sequences=128, guests=0, prefix_cache=False)
    parts = BlockSize(LAYER, 5 * LAYER)
    kv = plan_kv(config, MODEL, block_bytes=parts, free_bytes=1 << 40)
    window = WindowPool(BlockPool(kv.window_blocks), MODEL.window, kv.window_pin_blocks)
    pool = BlockPool(kv.blocks, window=window)
    scheduler = make_scheduler(pool, context_tokens=2048, max_sequences=128, prefix_cache=False)
    for number in range(128):
        sampling = SamplingParams(max_tokens=16, seed=0)
        scheduler.add(EngineRequest(str(number), [number] * 1984, sampling), 0.0)
    held = whole = 0
    while scheduler.busy:
        plan = scheduler.plan(0.0)
        blocks, local = pool.total - pool.idle, window.pool.total - window.pool.idle
        held = max(held, blocks * parts.whole + local * parts.window)
        whole = max(whole, blocks * 6 * LAYER)
        scheduler.commit(plan, [[1] for _ in plan.sampling])
    assert held <= 0.45 * whole
    assert pool.idle == pool.total
    assert window.pool.idle == window.pool.total
    reserved = kv.blocks * parts.whole + kv.window_blocks * parts.window
    assert reserved <= 0.55 * kv.blocks * 6 * LAYER
    # So many more tokens fit into the same memory.
    budget = 1 << 30
    fixed = EngineConfig(max_sequences=16, guests=0, kv_memory_bytes=budget)
    assert (
        count_blocks(fixed, MODEL, parts, budget)[0]
        > 3 * count_blocks(fixed, MODEL, BlockSize(6 * LAYER, 0), budget)[0]
    )
