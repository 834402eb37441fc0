"""The kernels for GPUs against the reference, by Triton's interpreter: what they compute, not how fast."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from maitred.engine.kernels.gpu import triton_attention
from maitred.engine.kernels.gpu.triton_attention import TritonAttention
from maitred.engine.kernels.reference import ReferenceAttention
from maitred.engine.models.token_major import TokenMajorCache
from tests.support.processors import needs_interpreter
from tests.unit.engine.kernels.test_attention import CAPPED_WINDOW, NUM_BLOCKS, TRAITS, config_of, step_of

pytestmark = needs_interpreter

CPU = torch.device("cpu")


def run(backend, config, batch, block_tokens, dtype, seed, qkv_dtype=None):
    generator = torch.Generator().manual_seed(seed)
    cache = TokenMajorCache(config, NUM_BLOCKS, block_tokens, dtype, "cpu")
    for entries in (cache.keys, cache.values):
        entries.copy_(torch.randn(entries.shape, generator=generator).clamp(-3, 3))
    qkv = torch.randn(len(batch.positions), config.qkv_features, generator=generator).to(qkv_dtype or dtype)
    return backend.attend(1, qkv, cache, backend.plan(batch, cache)), cache


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.bfloat16, 3e-2),
        (torch.float16, torch.float16, 4e-3),
        (torch.float32, torch.bfloat16, 2e-2),
    ],
)
@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate])  # slow: nothing is shrunk
@given(
    shape=st.sampled_from([(8, 4, 32, 16), (7, 1, 24, 4), (2, 2, 8, 8), (14, 2, 64, 16)]),
    traits=st.sampled_from(TRAITS),
    decodes=st.lists(st.integers(1, 40), max_size=4),
    chunks=st.lists(st.tuples(st.sampled_from([0, 0, 1, 4, 16, 23]), st.integers(1, 20)), max_size=4),
    seed=st.integers(0, 1 << 20),
)
def test_equals_reference(dtype, kv_dtype, tolerance, shape, traits, decodes, chunks, seed):
    heads, kv_heads, head_dim, block_tokens = shape
    if not decodes and not chunks:
        return
    config = config_of(heads, kv_heads, head_dim, **traits)
    batch = step_of(block_tokens, decodes, chunks, seed)
    expected, expected_cache = run(ReferenceAttention(config), config, batch, block_tokens, kv_dtype, seed, dtype)
    backend = TritonAttention(config, CPU, dtype)
    attended, cache = run(backend, config, batch, block_tokens, kv_dtype, seed, dtype)
    assert attended.dtype == dtype
    torch.testing.assert_close(attended, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(cache.keys, expected_cache.keys, atol=1e-5, rtol=1e-2)
    # The interpreter cuts bf16 off where a GPU rounds.
    torch.testing.assert_close(cache.values, expected_cache.values, atol=0, rtol=0 if dtype == kv_dtype else 1e-2)


@pytest.mark.parametrize("traits", [{}, CAPPED_WINDOW, {"windows": (0, 100)}])
def test_long_contexts_are_added_up_from_splits(monkeypatch, traits):
    """Of several splits, of which a short row fills but one, and of a single one the results are the same bits."""
    monkeypatch.setattr(triton_attention, "_LEAST_SPLIT_TOKENS", 64)
    monkeypatch.setattr(triton_attention, "_MOST_SPLITS", 8)
    config = config_of(8, 4, 32, **traits)
    batch = step_of(16, [200, 64, 65, 7, 129], [], 3)
    expected, _ = run(ReferenceAttention(config), config, batch, 16, torch.float32, 3)
    backend = TritonAttention(config, CPU, torch.float32)
    assert backend.plan(batch, TokenMajorCache(config, 1, 16, torch.float32, "cpu")).splits == 4
    attended, _ = run(backend, config, batch, 16, torch.float32, 3)
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("row", [0, 3])
def test_a_decode_does_not_depend_on_its_neighbours(monkeypatch, row):
    """Bit for bit, though the longest of a step decides how many splits there are."""
    monkeypatch.setattr(triton_attention, "_LEAST_SPLIT_TOKENS", 64)
    monkeypatch.setattr(triton_attention, "_MOST_SPLITS", 8)
    config = config_of(8, 4, 32)
    many = step_of(16, [200, 64, 65, 7], [], 5)
    backend = TritonAttention(config, CPU, torch.float32)
    generator = torch.Generator().manual_seed(5)
    cache = TokenMajorCache(config, NUM_BLOCKS, 16, torch.float32, "cpu")
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    qkv = torch.randn(4, config.qkv_features, generator=generator)
    together = backend.attend(1, qkv.clone(), cache, backend.plan(many, cache))
    blocks = -(-int(many.decode_lengths[row]) // 16)
    alone = many
    alone.num_decodes = 1
    alone.positions, alone.slots = many.positions[row : row + 1], many.slots[row : row + 1]
    alone.decode_tables = many.decode_tables[row : row + 1, :blocks].contiguous()
    alone.decode_lengths = many.decode_lengths[row : row + 1]
    single = backend.attend(1, qkv[row : row + 1].clone(), cache, backend.plan(alone, cache))
    assert torch.equal(together[row : row + 1], single)


def test_large_scores_do_not_overflow():
    config = config_of(8, 4, 32)
    batch = step_of(16, [40], [(4, 9)], 0)
    cache = TokenMajorCache(config, NUM_BLOCKS, 16, torch.float32, "cpu")
    cache.keys.normal_().mul_(1e4)
    cache.values.normal_()
    qkv = torch.randn(10, config.qkv_features) * 1e3
    reference, backend = ReferenceAttention(config), TritonAttention(config, CPU, torch.float32)
    expected = reference.attend(0, qkv.clone(), cache, reference.plan(batch, cache))
    torch.testing.assert_close(
        backend.attend(0, qkv, cache, backend.plan(batch, cache)), expected, atol=1e-4, rtol=1e-4
    )
