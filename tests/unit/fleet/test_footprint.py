from pathlib import Path

import pytest

from maitred.config.tree import BUNDLED_MODEL
from maitred.core.errors import ConfigInvalid
from maitred.engine.config import EngineConfig
from maitred.fleet.residency.footprint import PROCESS_BYTES, estimate_footprint

TOKEN_BYTES = 2 * 5 * 4 * 32 * 4
"""Of the bundled model: keys and values, 5 layers, 4 heads of 32, fp32."""


def test_weights_are_counted_in_the_type_that_is_computed_with():
    stored = (BUNDLED_MODEL / "model.safetensors").stat().st_size
    full = estimate_footprint(BUNDLED_MODEL, EngineConfig(dtype="fp32"), 1 << 30)
    half = estimate_footprint(BUNDLED_MODEL, EngineConfig(dtype="bf16"), 1 << 30)
    embedding = 4096 * 256 * 2
    assert full.weights_bytes == pytest.approx(2 * stored + embedding, rel=0.01)
    assert half.weights_bytes == pytest.approx(stored + embedding, rel=0.01)


def test_the_cache_is_the_configured_size_or_what_all_could_use_or_a_part_of_the_budget():
    footprint = estimate_footprint(BUNDLED_MODEL, EngineConfig(kv_memory_bytes=64 << 20), 1 << 30)
    assert footprint.kv_bytes == 64 << 20
    assert footprint.total_bytes == footprint.weights_bytes + footprint.kv_bytes + PROCESS_BYTES
    few = estimate_footprint(BUNDLED_MODEL, EngineConfig(max_sequences=2), 1 << 30)
    assert few.kv_bytes == 2 * 2048 * TOKEN_BYTES
    many = estimate_footprint(BUNDLED_MODEL, EngineConfig(), 1 << 30)
    assert many.kv_bytes == 1 << 28


def test_the_card_says_what_its_engine_will_say():
    card = estimate_footprint(BUNDLED_MODEL, EngineConfig(kv_memory_bytes=TOKEN_BYTES * 1024), 1 << 30).card
    assert (card.context_tokens, card.kv_capacity_tokens, card.vocab_size) == (1024, 1024, 4096)
    assert card.eos_token_ids == (4,)


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ConfigInvalid, match="does not exist"):
        estimate_footprint(tmp_path, EngineConfig(), 1 << 30)
