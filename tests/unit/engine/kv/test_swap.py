from maitred.engine.kv.blocks import BlockPool
from maitred.engine.kv.swap import BlockCopy, SwapSpace
from maitred.engine.kv.table import BlockTable


def pool_of(blocks, slots):
    swap = SwapSpace(slots)
    return BlockPool(blocks, swap), swap


def computed(pool, tokens, scope=""):
    """A sequence that has computed all its tokens, in blocks of two."""
    table = BlockTable(pool, 2, scope)
    assert table.open(tokens) is not None
    table.publish(tokens, len(tokens))
    return table


def preempted(pool, tokens, scope=""):
    table = computed(pool, tokens, scope)
    table.await_return()
    table.release()
    return table


def test_only_what_is_written_over_is_copied_out():
    pool, swap = pool_of(4, 4)
    tokens = [1, 2, 3, 4, 5]
    table = preempted(pool, tokens)
    assert swap.take_moves() == []
    other = computed(pool, [9] * 6)  # takes the two blocks without a key, and the last one that has one
    assert [move.out for move in swap.take_moves()] == [True]
    other.release()
    assert table.open(tokens) == 4
    assert [move.out for move in swap.take_moves()] == [False]


def test_without_anybody_who_waits_nothing_is_copied():
    pool, swap = pool_of(2, 4)
    computed(pool, [1, 2, 3, 4]).release()
    computed(pool, [5, 6, 7, 8])
    assert swap.take_moves() == []


def test_a_restored_block_is_found_by_others_of_its_scope_and_no_others():
    pool, _ = pool_of(4, 4)
    tokens = [1, 2, 3, 4, 5]
    table = preempted(pool, tokens, "a")
    computed(pool, list(range(10, 18)), "b").release()
    assert BlockTable(pool, 2, "b").cached_tokens(tokens) == 0
    assert BlockTable(pool, 2, "a").cached_tokens(tokens) == 4
    assert table.open(tokens) == 4


def test_no_more_is_kept_than_fits():
    pool, swap = pool_of(4, 1)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    table = preempted(pool, tokens)
    computed(pool, list(range(10, 18))).release()
    assert swap.free == 0
    moves = swap.take_moves()
    assert len(moves) == 1
    table.await_no_more()
    assert swap.free == 1


def test_a_slot_used_twice_in_a_step_is_moved_in_order():
    pool, swap = pool_of(2, 1)
    first = preempted(pool, [1, 2, 3])
    second = preempted(pool, [4, 5, 6])
    (out,) = swap.take_moves()
    assert out == BlockCopy(out.block, 0, out=True)
    assert first.open([1, 2, 3]) == 2
    first.await_no_more()
    first.release()
    assert second.open([4, 5, 6]) in (0, 2)
    moves = swap.take_moves()
    assert moves[0] == BlockCopy(moves[0].block, 0, out=False)
