import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.errors import ConfigInvalid
from maitred.engine.config import EngineConfig
from maitred.engine.kv.plan import BlockSize, count_blocks, local_layers, plan_kv, wanted_bytes
from maitred.engine.kv.window import window_blocks_needed
from maitred.engine.models.config import ModelConfig

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    context_tokens=2048,
    norm_epsilon=1e-5,
)
BLOCK_BYTES = BlockSize(1 << 20, 0)
GIB = 1 << 30


def test_a_configured_budget_is_spent_in_full():
    kv = plan_kv(EngineConfig(kv_memory_bytes=GIB), MODEL, block_bytes=BLOCK_BYTES, free_bytes=0)
    assert kv.blocks == 1024
    assert kv.context_tokens == 2048


def test_an_automatic_budget_takes_what_is_offered_but_no_more_than_can_be_used():
    plenty = plan_kv(EngineConfig(max_sequences=3), MODEL, block_bytes=BLOCK_BYTES, free_bytes=100 * GIB)
    assert plenty.blocks == 3 * 2048 // 16
    scarce = plan_kv(EngineConfig(), MODEL, block_bytes=BLOCK_BYTES, free_bytes=GIB)
    assert scarce.blocks == 1024


def test_the_window_shrinks_to_what_the_cache_holds():
    kv = plan_kv(EngineConfig(kv_memory_bytes=64 << 20), MODEL, block_bytes=BLOCK_BYTES, free_bytes=0)
    assert kv.blocks == 64
    assert kv.context_tokens == 1024


def test_the_window_is_never_longer_than_the_models():
    config = EngineConfig(context_tokens=100_000)
    assert plan_kv(config, MODEL, block_bytes=BLOCK_BYTES, free_bytes=100 * GIB).context_tokens == 2048


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(kv_memory_bytes=1 << 20),
        EngineConfig(kv_memory_bytes=64 << 20, context_tokens=2048),
    ],
    ids=["no room for anything", "no room for what was asked"],
)
def test_too_small_a_budget_says_what_to_do(config):
    with pytest.raises(ConfigInvalid, match=r"kv_memory_bytes .*65536 bytes.* or lower engine.context_tokens"):
        plan_kv(config, MODEL, block_bytes=BLOCK_BYTES, free_bytes=0)


WINDOW = msgspec.structs.replace(MODEL, layers=6, windows=(0, 64, 64, 64, 64, 64))
PARTS = BlockSize(1 << 20, 5 << 20)


def test_layers_with_a_window_take_what_all_sequences_can_hold_and_no_more():
    config = EngineConfig(max_sequences=8, guests=0, step_tokens=256)
    held = window_blocks_needed(64, 16, sequences=8, step_tokens=256)
    pin_blocks = int(config.pins.share * held)
    assert held == 8 * 8 + 17 + 0
    kv = plan_kv(config, WINDOW, block_bytes=PARTS, free_bytes=100 * GIB)
    unused = (8 * 2048 // 16 - held - pin_blocks) // 8
    assert (kv.blocks, kv.window_blocks, kv.window_pin_blocks) == (
        8 * 2048 // 16,
        held + pin_blocks + unused,
        pin_blocks,
    )
    assert wanted_bytes(config, WINDOW, PARTS) == kv.blocks * PARTS.whole + kv.window_blocks * PARTS.window
    assert wanted_bytes(config, WINDOW, PARTS) < 0.4 * kv.blocks * sum(PARTS)
    fixed = msgspec.structs.replace(config, kv_memory_bytes=GIB)
    kv = plan_kv(fixed, WINDOW, block_bytes=PARTS, free_bytes=0)
    assert kv.blocks > 1.5 * 1024 / 6
    assert kv.window_blocks == held + pin_blocks + (kv.blocks - held - pin_blocks) // 8
    assert 1024 - 6 < kv.blocks + 5 * kv.window_blocks <= 1024


@settings(deadline=None)
@given(
    budget=st.integers(6 << 20, 4 * GIB),
    sequences=st.integers(1, 64),
    window=st.integers(1, 2047),
    whole=st.integers(0, 5),
)
def test_blocks_fit_into_the_budget(budget, sequences, window, whole):
    model = msgspec.structs.replace(WINDOW, windows=(window,) * 6)
    config = EngineConfig(max_sequences=sequences, step_tokens=256, kv_memory_bytes=budget, guests=0)
    parts = BlockSize(whole << 20, 6 - whole << 20)
    blocks, of_window, pin_blocks = count_blocks(config, model, parts, budget)
    assert blocks * parts.whole + of_window * parts.window <= budget
    held = window_blocks_needed(window, 16, sequences=sequences, step_tokens=256)
    assert of_window >= min(held, blocks), "a sequence could miss a block"
    assert of_window - pin_blocks >= held or of_window == blocks


def test_a_window_as_long_as_the_context_is_none():
    assert local_layers(WINDOW, EngineConfig()) == 5
    assert local_layers(WINDOW, EngineConfig(context_tokens=64)) == 0
