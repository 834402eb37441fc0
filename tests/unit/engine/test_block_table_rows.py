import numpy as np

from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.block_table_rows import BlockTableRows
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.kv.table import BlockTable
from maitred.engine.scheduler.plan import Chunk
from maitred.engine.scheduler.sequence import Sequence

POOL = BlockPool(64)


def make_sequence(key, tokens):
    request = EngineRequest(id=str(key), prompt=[1] * tokens, sampling=SamplingParams(max_tokens=8, seed=0))
    sequence = Sequence(key, request, 0, BlockTable(POOL, 4, ""), frozenset())
    sequence.table.open(sequence.tokens)
    return sequence


def rows(lanes, *sequences):
    return lanes.tables([Chunk(sequence, 0, 1) for sequence in sequences])


def test_rows_follow_the_block_tables_as_they_grow():
    lanes = BlockTableRows(max_sequences=2, context_tokens=32, block_tokens=4)
    short, long = make_sequence(1, 3), make_sequence(2, 10)
    lanes.take(short)
    lanes.take(long)
    tables = rows(lanes, short, long)
    assert tables.dtype == np.int32
    assert tables.shape == (2, 3)
    assert tables[0, 0] == short.table.blocks[0]
    assert tables[1].tolist() == long.table.blocks
    short.table.grow(9)
    assert rows(lanes, short)[0].tolist() == short.table.blocks


def test_a_lane_is_reused_without_a_trace_of_its_last_sequence():
    lanes = BlockTableRows(max_sequences=1, context_tokens=32, block_tokens=4)
    first = make_sequence(1, 12)
    lanes.take(first)
    rows(lanes, first)
    lanes.release(first)
    assert first not in lanes
    second = make_sequence(2, 6)
    lanes.take(second)
    assert rows(lanes, second)[0].tolist() == second.table.blocks


def test_a_resumed_sequence_shows_its_new_blocks():
    lanes = BlockTableRows(max_sequences=1, context_tokens=32, block_tokens=4)
    sequence = make_sequence(1, 8)
    lanes.take(sequence)
    rows(lanes, sequence)
    lanes.release(sequence)
    sequence.table.release()
    taken = POOL.allocate(3)
    sequence.table.open(sequence.tokens)
    lanes.take(sequence)
    assert rows(lanes, sequence)[0].tolist() == sequence.table.blocks
    POOL.free(taken)


def test_releasing_twice_is_harmless():
    lanes = BlockTableRows(max_sequences=1, context_tokens=8, block_tokens=4)
    sequence = make_sequence(1, 2)
    lanes.take(sequence)
    lanes.release(sequence)
    lanes.release(sequence)
    lanes.take(make_sequence(2, 2))
