import random

from maitred.core.prefix import block_key, root_key
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.kv.table import BlockTable


def test_allocates_all_or_nothing():
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.idle == 3
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    assert pool.allocate(1) is None


def test_least_recently_freed_content_goes_first():
    pool = BlockPool(3)
    first, second, third = pool.allocate(3)
    for block, key in ((first, b"1"), (second, b"2"), (third, b"3")):
        pool.publish(block, key)
    pool.free([second])
    pool.free([first])
    pool.free([third])
    assert pool.allocate(1) == [second]
    assert pool.find(b"2") is None
    assert pool.find(b"1") == first
    assert pool.evictions == 1


def test_blocks_without_a_key_are_reused_before_cached_ones():
    pool = BlockPool(2)
    cached, plain = pool.allocate(2)
    pool.publish(cached, b"kept")
    pool.free([cached])
    pool.free([plain])
    assert pool.allocate(1) == [plain]
    assert pool.find(b"kept") == cached


def test_cached_blocks_are_those_that_are_idle_and_can_be_found():
    chance, pool, held = random.Random(5), BlockPool(12), []
    for number in range(2000):
        if held and chance.random() < 0.5:
            pool.free(held.pop(chance.randrange(len(held))))
        elif chance.random() < 0.3 and (found := pool.find(b"%d" % chance.randrange(20))) is not None:
            pool.share([found])
            held.append([found])
        elif (blocks := pool.allocate(chance.randint(1, 4))) is not None:
            held.append(blocks)
            for block in blocks:
                if chance.random() < 0.7:
                    pool.publish(block, b"%d" % chance.randrange(20))
        findable = {pool.find(key) for key in pool.keys()}  # noqa: SIM118 - it is no mapping
        assert pool.cached == sum(not pool.reference_count(block) for block in findable), number
    for blocks in held:
        pool.free(blocks)
    pool.clear()
    assert pool.cached == 0


def test_a_revived_block_is_not_handed_out():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], b"prefix")
    pool.free(blocks)
    pool.share(blocks)
    assert pool.idle == 1
    assert pool.allocate(2) is None
    assert pool.reference_count(blocks[0]) == 1


def test_the_first_block_with_a_key_keeps_it():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    pool.free([second])
    assert pool.find(b"same") == first
    pool.allocate(1)
    assert pool.find(b"same") == first


def test_keys_name_the_whole_prefix_and_the_scope():
    root = root_key("a")
    assert block_key(root, [1, 2]) != block_key(root, [2, 1])
    assert block_key(block_key(root, [1]), [2]) != block_key(block_key(root, [3]), [2])
    assert block_key(root, [1]) != block_key(root_key("b"), [1])


def test_a_table_reuses_full_blocks_but_always_computes_a_token():
    pool = BlockPool(8)
    writer = BlockTable(pool, 2, "scope")
    assert writer.open([1, 2, 3, 4]) == 0
    writer.publish([1, 2, 3, 4], 4)

    same = BlockTable(pool, 2, "scope")
    assert same.open([1, 2, 3, 4]) == 2, "the last token's logits are wanted, so its block is recomputed"
    longer = BlockTable(pool, 2, "scope")
    assert longer.open([1, 2, 3, 4, 5]) == 4
    elsewhere = BlockTable(pool, 2, "other")
    assert elsewhere.open([1, 2, 3, 4]) == 0
    for table in (writer, same, longer, elsewhere):
        table.release()
    assert pool.idle == pool.total


def test_opening_without_free_blocks_changes_nothing():
    pool = BlockPool(4)
    writer = BlockTable(pool, 1, "")
    writer.open([1, 2])
    writer.publish([1, 2], 2)
    assert BlockTable(pool, 1, "").open([1, 2, 3, 4, 5]) is None
    assert BlockTable(pool, 1, "").open([3, 4], reserved=1) is None
    assert pool.idle == 2
    assert [pool.reference_count(block) for block in writer.blocks] == [1, 1]
    assert pool.evictions == 0
