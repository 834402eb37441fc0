import pytest

from maitred.core.errors import ConfigInvalid
from maitred.engine.config import EngineConfig
from maitred.engine.loader import plan_kv
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
BLOCK_BYTES = 1 << 20
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
