"""Every backend against the reference, on random steps."""

import dataclasses
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.engine.kernels import cpu, paged
from maitred.engine.kernels.cpu import CPUAttention
from maitred.engine.kernels.gpu.sdpa import TorchAttention
from maitred.engine.kernels.job import FP32
from maitred.engine.kernels.prefill import plan_buckets
from maitred.engine.kernels.reference import ReferenceAttention
from maitred.engine.models.batch import BatchChunk, ForwardBatch, WindowBlocks
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.rotary_config import RotaryConfig

# (heads, kv_heads, head_dim, block_tokens): few, since each shape compiles a kernel.
SHAPES = [(8, 4, 32, 16), (7, 1, 24, 4)]
NUM_BLOCKS = 96


def config_of(heads: int, kv_heads: int, head_dim: int, **traits: object) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=heads * head_dim,
        intermediate_size=8,
        layers=2,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_tokens=512,
        norm_epsilon=1e-5,
        **traits,
    )


CAPPED_WINDOW = {"windows": (0, 11), "score_cap": 0.7, "score_scale": 0.3, "local_rotary": RotaryConfig(theta=500.0)}
"""Layer 1, which `run` computes, attends to 11 tokens, with capped scores and a rotary embedding of its own."""
TRAITS = [{}, {"windows": (0, 5)}, CAPPED_WINDOW, {"windows": (0, 500), "unrotated": (1,)}]


def step_of(block_tokens: int, decodes: list[int], chunks: list[tuple[int, int]], seed: int) -> ForwardBatch:
    """Decodes of the given lengths and chunks of the given (context before, length), in random blocks."""
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()
    positions, slots, tables, parts = [], [], [], []
    for before, length in [(total - 1, 1) for total in decodes] + chunks:
        table = [free.pop() for _ in range(-(-(before + length) // block_tokens))]
        if len(tables) >= len(decodes):
            parts.append(BatchChunk(len(positions), length, before, table))
        tables.append(table)
        for position in range(before, before + length):
            positions.append(position)
            slots.append(table[position // block_tokens] * block_tokens + position % block_tokens)
    width = max((len(table) for table in tables[: len(decodes)]), default=0)
    padded = [table + [table[0]] * (width - len(table)) for table in tables[: len(decodes)]]
    return ForwardBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        logit_rows=torch.zeros(0, dtype=torch.int64),
        num_decodes=len(decodes),
        decode_tables=torch.tensor(padded, dtype=torch.int32).view(len(decodes), width),
        decode_lengths=torch.tensor(decodes, dtype=torch.int32),
        chunks=parts,
    )


def run(
    backend, config: ModelConfig, batch: ForwardBatch, block_tokens: int, dtype: torch.dtype, seed: int, qkv_dtype=None
):
    """What the backend answers, and the cache after it; the same random input for every backend."""
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache(config, NUM_BLOCKS, block_tokens, dtype, "cpu")
    spread = 40 if cache.rounded else 1
    for entries in (cache.keys, cache.values):
        entries.copy_(spread * torch.randn(entries.shape, generator=generator).clamp(-3, 3))
    for scales in (cache.key_scales, cache.value_scales):
        scales.copy_(torch.rand(scales.shape, generator=generator) / 40)
    qkv = torch.randn(len(batch.positions), config.qkv_features, generator=generator).to(qkv_dtype or dtype)
    return backend.attend(1, qkv, cache, backend.plan(batch, cache)), cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [CPUAttention, lambda config: CPUAttention(config, threads=3), TorchAttention])
@settings(max_examples=15, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    traits=st.sampled_from(TRAITS),
    decodes=st.lists(st.integers(1, 40), max_size=6),
    chunks=st.lists(st.tuples(st.sampled_from([0, 0, 1, 4, 16, 23]), st.integers(1, 20)), max_size=6),
    seed=st.integers(0, 1 << 20),
)
def test_equals_reference(make, dtype, shape, traits, decodes, chunks, seed):
    heads, kv_heads, head_dim, block_tokens = shape
    if not decodes and not chunks:
        return
    # In blocks of 4, twelve sequences of 43 tokens would not fit.
    decodes, chunks = (decodes, chunks) if block_tokens > 4 else (decodes[:4], chunks[:4])
    config = config_of(heads, kv_heads, head_dim, **traits)
    batch = step_of(block_tokens, decodes, chunks, seed)
    expected, expected_cache = run(ReferenceAttention(config), config, batch, block_tokens, dtype, seed)
    backend = make(config) if make is not TorchAttention else TorchAttention(config, "cpu")
    attended, cache = run(backend, config, batch, block_tokens, dtype, seed)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(attended, expected, **tolerance)
    torch.testing.assert_close(cache.keys, expected_cache.keys, **tolerance)
    torch.testing.assert_close(cache.values, expected_cache.values, **tolerance)


@pytest.mark.parametrize("make", [CPUAttention, lambda config: TorchAttention(config, "cpu")])
def test_bfloat16_cache_under_fp32_weights(make):
    config = config_of(8, 4, 32)
    batch = step_of(16, [33, 7], [(0, 9), (20, 5)], 1)
    rest = (config, batch, 16, torch.bfloat16, 1, torch.float32)
    expected, expected_cache = run(ReferenceAttention(config), *rest)
    attended, cache = run(make(config), *rest)
    assert attended.dtype == torch.float32
    torch.testing.assert_close(attended, expected, atol=2e-2, rtol=2e-2)
    # A rotation that differs in its last bit may round to the neighbour.
    torch.testing.assert_close(cache.keys, expected_cache.keys, atol=1e-6, rtol=1e-2)
    assert torch.equal(cache.values, expected_cache.values)


@pytest.mark.parametrize("qkv_dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=15, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    decodes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    chunks=st.lists(st.tuples(st.sampled_from([0, 4, 16, 23]), st.integers(1, 20)), max_size=4),
    seed=st.integers(0, 1 << 20),
)
def test_int8_cache(qkv_dtype, shape, decodes, chunks, seed):
    heads, kv_heads, head_dim, block_tokens = shape
    config = config_of(heads, kv_heads, head_dim)
    rest = (config, step_of(block_tokens, decodes, chunks, seed), block_tokens, torch.int8, seed, qkv_dtype)
    expected, expected_cache = run(ReferenceAttention(config), *rest)
    attended, cache = run(CPUAttention(config), *rest)
    # A number halfway between two bytes may go either way.
    tolerance = 2e-2 if qkv_dtype == torch.float32 else 4e-2
    torch.testing.assert_close(attended, expected, atol=tolerance, rtol=tolerance)
    for name in ("key_scales", "value_scales"):
        torch.testing.assert_close(getattr(cache, name), getattr(expected_cache, name), atol=1e-6, rtol=1e-5)
    assert (cache.keys.int() - expected_cache.keys.int()).abs().max() <= 1
    assert (cache.values.int() - expected_cache.values.int()).abs().max() <= 1


def test_what_int8_stores_of_a_token_does_not_depend_on_its_neighbours():
    config, generator = config_of(8, 4, 32), torch.Generator().manual_seed(2)
    qkv = torch.randn(9, config.qkv_features, generator=generator)
    qkv[::2] *= 100

    def stored(order: list[int]) -> list[torch.Tensor]:
        cache = KVCache(config, NUM_BLOCKS, 16, torch.int8, "cpu")
        backend = CPUAttention(config)
        for row in order:
            one = torch.tensor([row])
            batch = ForwardBatch(one, one, one, one[:0], chunks=[BatchChunk(0, 1, row, [0])])
            backend.attend(0, qkv[row : row + 1].clone(), cache, backend.plan(batch, cache))
        return [cache.keys, cache.values, cache.key_scales, cache.value_scales]

    forwards, backwards = stored(list(range(9))), stored(list(range(8, -1, -1)))
    assert all(map(torch.equal, forwards, backwards))
    assert forwards[2].count_nonzero() == 9 * config.kv_heads


def test_int8_rounds_each_number_by_half_a_step_at_most():
    config = config_of(8, 4, 32)
    cache = KVCache(config, 2, 16, torch.int8, "cpu")
    keys, values = torch.randn(20, 4, 32), torch.randn(20, 4, 32)
    values[3] = 0
    cache.write(1, keys, values, torch.arange(20))
    for stored, given_ in zip(cache.gather(1, torch.tensor([[0, 1]])), (keys, values), strict=True):
        step = given_.abs().amax(dim=2, keepdim=True) / 127
        assert ((stored[0, :20] - given_).abs() <= 0.501 * step).all()
    assert KVCache.bytes_per_block(config, 16, torch.int8) == 2 * config.layers * 4 * 16 * (32 + 4)


def test_large_scores_do_not_overflow():
    config = config_of(8, 4, 32)
    batch = step_of(16, [40], [], 0)
    cache = KVCache(config, NUM_BLOCKS, 16, torch.float32, "cpu")
    cache.keys.normal_().mul_(1e4)
    cache.values.normal_()
    qkv = torch.randn(1, config.qkv_features) * 1e3
    expected, backend = ReferenceAttention(config), CPUAttention(config)
    answer = backend.attend(0, qkv.clone(), cache, backend.plan(batch, cache))
    torch.testing.assert_close(
        answer, expected.attend(0, qkv, cache, expected.plan(batch, cache)), atol=1e-4, rtol=1e-4
    )


def test_a_decode_does_not_depend_on_its_neighbours():
    """Bit for bit, whatever else is in the step and however many threads share it."""
    config = config_of(8, 4, 32)
    many = step_of(16, [33, 70, 21, 90], [], 5)
    one = ForwardBatch(
        token_ids=many.token_ids[:1],
        positions=many.positions[:1],
        slots=many.slots[:1],
        logit_rows=many.logit_rows,
        num_decodes=1,
        decode_tables=many.decode_tables[:1],
        decode_lengths=many.decode_lengths[:1],
    )
    together, _ = run(CPUAttention(config, threads=2), config, many, 16, torch.float32, 5)
    alone, _ = run(CPUAttention(config, threads=1), config, one, 16, torch.float32, 5)
    assert torch.equal(together[:1], alone)


def answers(config: ModelConfig, block_tokens: int, dtype: torch.dtype, cuts: list[int], threads: int) -> torch.Tensor:
    """Of one sequence that comes in parts of these lengths, those of one token as decodes."""
    qkv = torch.randn(sum(cuts), config.qkv_features, generator=torch.Generator().manual_seed(3))
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(4))
    table = free[: -(-sum(cuts) // block_tokens)].tolist()
    cache = KVCache(config, NUM_BLOCKS, block_tokens, dtype, "cpu")
    backend, parts, start = CPUAttention(config, threads=threads), [], 0
    for length in cuts:
        positions = torch.arange(start, start + length)
        blocks = torch.tensor(table)[positions // block_tokens]
        batch = ForwardBatch(
            token_ids=positions,
            positions=positions,
            slots=blocks * block_tokens + positions % block_tokens,
            logit_rows=positions[:0],
            chunks=[BatchChunk(0, length, start, table)],
        )
        if length == 1:
            batch.chunks = []
            batch.num_decodes = 1
            batch.decode_tables = torch.tensor([table], dtype=torch.int32)
            batch.decode_lengths = torch.tensor([start + 1], dtype=torch.int32)
        part = qkv[start : start + length].clone()
        parts.append(backend.attend(1, part, cache, backend.plan(batch, cache)))
        start += length
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("traits", [{}, CAPPED_WINDOW])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_tokens"), [*SHAPES, (8, 1, 16, 8), (9, 1, 16, 16)])
def test_a_chunk_is_added_up_as_decodes_are(monkeypatch, heads, kv_heads, head_dim, block_tokens, traits, dtype):
    """Bit for bit, however it is cut, and on however many threads."""
    monkeypatch.setattr(cpu, "_WORTH_A_THREAD", 1)
    config = config_of(heads, kv_heads, head_dim, **traits)
    expected = answers(config, block_tokens, dtype, [1] * 75, 1)
    for threads, cuts in [(1, [75]), (3, [75]), (1, [1, 2, 3, 4, 5, 60]), (2, [37, 1, 1, 36]), (1, [2] * 37 + [1])]:
        assert torch.equal(answers(config, block_tokens, dtype, cuts, threads), expected), (threads, cuts)


PROCESSORS = [(16, 8), (32, 16)]
"""(vector registers, fp32 numbers of each): AVX2 and AVX-512."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize(("registers", "lanes"), PROCESSORS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_tokens"), [(7, 1, 64, 16), (2, 2, 80, 16), (4, 2, 24, 1), (33, 1, 16, 4)]
)
def test_tiles_for_other_registers_compute_the_same(
    monkeypatch, heads, kv_heads, head_dim, block_tokens, registers, lanes, dtype
):
    """As the reference does, and a row of a chunk to the last bit as a decode."""
    monkeypatch.setattr(cpu, "attention", partial(paged.attention, registers=registers, vector_lanes=lanes))
    config = config_of(heads, kv_heads, head_dim)
    assert torch.equal(
        answers(config, block_tokens, dtype, [1, 40, 2, 3, 1], 1), answers(config, block_tokens, dtype, [1] * 47, 1)
    )
    rest = (config, step_of(block_tokens, [23, 6], [(0, 9), (16, 5)], 1), block_tokens, dtype, 1, torch.float32)
    expected, _ = run(ReferenceAttention(config), *rest)
    attended, _ = run(CPUAttention(config), *rest)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(attended, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("registers", "lanes"), PROCESSORS)
@pytest.mark.parametrize("strip", [1, 4, 8, 16])
def test_sums_stay_in_registers(registers, lanes, strip):
    """Or each of them is loaded and stored for every number that is added: a quarter of the speed."""
    for lines in range(1, 65):
        for unroll in (1, 2, 4, 8) if registers == 32 else (1, 2):
            at_once, strips = paged.tile_size(lines, unroll, strip, registers, lanes)
            parts = -(-lines // at_once)
            taken = strips * -(-strip // lanes) * (1 + unroll * -(-lines // parts)) + 1
            assert taken <= registers


def test_a_tile_is_as_large_as_registers_allow():
    assert paged.tile_size(14, 1, 16, 32, 16) == (14, 2)
    assert paged.tile_size(14, 1, 16, 16, 8) == (6, 1)
    assert paged.tile_size(2, 1, 16, 16, 8) == (2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_blocks_of_the_window_alone(dtype):
    """Layers with a window may have blocks of their own; those before the window are not read."""
    config = config_of(8, 4, 32, windows=(0, 11))
    batch = step_of(4, [33, 7], [(0, 9), (20, 15)], 1)
    spread = torch.randn(len(batch.positions), config.qkv_features, generator=torch.Generator().manual_seed(1))
    whole = KVCache(config, NUM_BLOCKS, 4, dtype, "cpu")
    parted = KVCache(config, NUM_BLOCKS, 4, dtype, "cpu", window_blocks=NUM_BLOCKS)
    assert parted.window is not None
    own = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(3)
    for given_, of_whole, of_window in zip(whole.parts, parted.parts, parted.window.parts, strict=True):
        given_.copy_(torch.randn(given_.shape, generator=generator).mul(20 if dtype == torch.int8 else 1))
        of_whole[0] = given_[0]
        of_window[0, own] = given_[1]
    window = WindowBlocks(
        slots=own[batch.slots // 4] * 4 + batch.slots % 4,
        decode_tables=own[batch.decode_tables.long()].int(),
        chunk_tables=[own[chunk.block_table].tolist() for chunk in batch.chunks],
    )
    for row, length in enumerate(batch.decode_lengths.tolist()):
        window.decode_tables[row, : max(0, length - 11) // 4] = NUM_BLOCKS + 1000
    window.chunk_tables[1][: (20 + 1 - 11) // 4] = [NUM_BLOCKS + 1000] * 2
    for layer in (0, 1):
        backend = CPUAttention(config)
        expected = backend.attend(layer, spread.clone(), whole, backend.plan(batch, whole))
        parts = dataclasses.replace(batch, window=window)
        assert torch.equal(backend.attend(layer, spread.clone(), parted, backend.plan(parts, parted)), expected)
        table = torch.tensor(batch.chunks[0].block_table)
        for given_, found in zip(
            whole.gather(layer, table[None]),
            parted.gather(layer, own[table][None] if layer else table[None]),
            strict=True,
        ):
            assert torch.equal(given_, found)


def test_buckets_are_few_and_hold_every_row_once():
    chunks, row = [], 0
    for index in range(64):
        length = 1 + (index * 7) % 60
        chunks.append(BatchChunk(row, length, 16 * (index % 5), list(range(20))))
        row += length
    buckets = plan_buckets(chunks, 16, torch.float32, torch.device("cpu"))
    assert len(buckets) < 25
    assert sorted(torch.cat([bucket.kept_rows for bucket in buckets]).tolist()) == list(range(row))
    for bucket in buckets:
        assert bucket.rows.numel() < 2 * len(bucket.kept)


def test_compiled_kernels_are_kept_on_disk():
    """A process that starts later loads them instead of compiling."""
    kernel = paged.attention(32, 16, 2, FP32)
    assert Path(kernel.compiled._cache.cache_path).is_dir()


_ONE_STEP = """
import torch
from maitred.engine.kernels.gate import gate_fused
from tests.unit.engine.kernels.test_attention import CPUAttention, config_of, run, step_of
config = config_of(8, 4, 32)
attended, _ = run(CPUAttention(config, threads=1), config, step_of(16, [33, 70], [(0, 40)], 5), 16, torch.float32, 5)
print(attended.numpy().tobytes().hex(), gate_fused(attended).numpy().tobytes().hex())
"""


def test_a_process_that_compiles_computes_what_others_do_that_load(tmp_path):
    """An engine that is started again must go on as the first one, which may have compiled, would have."""
    answers = [
        subprocess.run(
            [sys.executable, "-c", _ONE_STEP],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(["src", "."])},
            capture_output=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert len(answers[0]) > 1000
    assert answers[0] == answers[1]
