import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maitred.engine.kv.swap import BlockCopy
from maitred.engine.models.host_blocks import HostBlocks
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.token_major import TokenMajorCache
from tests.unit.engine.kernels.test_attention import config_of

BLOCKS, SLOTS = 6, 3


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (KVCache, torch.float32),
        (KVCache, torch.bfloat16),
        (KVCache, torch.int8),
        (TokenMajorCache, torch.float32),
        (TokenMajorCache, torch.bfloat16),
    ],
)
@given(moves=st.lists(st.builds(BlockCopy, st.integers(0, BLOCKS - 1), st.integers(0, SLOTS - 1), st.booleans())))
def test_blocks_come_back_byte_for_byte(kind, dtype, moves):
    """Whatever is moved in whatever order, each place holds what was moved there last."""
    cache = kind(config_of(4, 2, 8), BLOCKS, 4, dtype, "cpu")
    for number, part in enumerate(cache.parts):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(number)) * 50)
    before = [part.clone() for part in cache.parts]
    host = HostBlocks(cache, SLOTS)
    in_block, in_slot = list(range(BLOCKS)), [None] * SLOTS
    real = [
        move for move in moves if move.out or any(m.out and m.slot == move.slot for m in moves[: moves.index(move)])
    ]
    for block, slot, out in real:
        if out:
            in_slot[slot] = in_block[block]
        elif in_slot[slot] is not None:
            in_block[block] = in_slot[slot]
    host.move(cache, real)
    for part, kept in zip(cache.parts, before, strict=True):
        assert torch.equal(part, kept[:, in_block])


def test_trying_how_long_a_copy_takes_changes_nothing():
    cache = TokenMajorCache(config_of(4, 2, 8), BLOCKS, 4, torch.float32, "cpu")
    cache.keys.normal_()
    before = cache.keys.clone()
    assert HostBlocks(cache, SLOTS).seconds_per_block(cache, block=2) > 0
    assert torch.equal(cache.keys, before)
