"""Replayed steps against computed ones. A graph is played by what it stands for: the same work on the same memory."""

import pytest
import torch

from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig
from maitred.engine.device import ComputeDevice
from maitred.engine.graphs.decoder import GraphedDecoder, graph_sizes
from maitred.engine.models.batch import BatchChunk, ForwardBatch
from maitred.engine.models.load import load_model
from maitred.engine.models.token_major import make_cache
from tests.support.models import make_model

BLOCK_TOKENS = 4
TABLE_WIDTH = 6
BLOCKS = 60
SIZES = [1, 2, 4, 8]


class Rerun:
    """Runs again what was captured, and leaves the result where the first one was."""

    replays = 0

    @torch.inference_mode()
    def capture(self, compute):
        self.compute = compute
        self.result = compute().clone()
        return self.result

    @torch.inference_mode()
    def replay(self):
        Rerun.replays += 1
        self.result.copy_(self.compute())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, "qwen2")
    return folder


@pytest.fixture(scope="module")
def decoder(folder):
    return load_model(folder, dtype=torch.float32, accelerated=True).decoder


def cache_of(decoder):
    return make_cache(decoder.config, BLOCKS, BLOCK_TOKENS, torch.float32, torch.device("cpu"), accelerated=True)


def graphed(decoder, cache):
    return GraphedDecoder(decoder, cache, sizes=SIZES, table_width=TABLE_WIDTH, make_graph=Rerun)


def decodes(lengths, wanted=None, seed=0):
    """Sequences of the given lengths, the last token of each to be computed, in random blocks."""
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(BLOCKS, generator=generator).tolist()
    tables = [[free.pop() for _ in range(-(-length // BLOCK_TOKENS))] for length in lengths]
    width = max(map(len, tables))
    last = [length - 1 for length in lengths]
    rows = range(len(lengths)) if wanted is None else wanted
    return ForwardBatch(
        token_ids=torch.randint(4, 120, (len(lengths),), generator=generator),
        positions=torch.tensor(last),
        slots=torch.tensor(
            [t[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for t, p in zip(tables, last, strict=True)]
        ),
        logit_rows=torch.tensor(list(rows), dtype=torch.int64),
        num_decodes=len(lengths),
        decode_tables=torch.tensor([t + [t[0]] * (width - len(t)) for t in tables], dtype=torch.int32),
        decode_lengths=torch.tensor(lengths, dtype=torch.int32),
    )


def test_sizes_rise_to_the_largest_batch():
    assert graph_sizes(0) == []
    assert graph_sizes(1) == [1]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(256)[-3:] == [192, 224, 256]
    for batch in range(9, 257):
        size = next(size for size in graph_sizes(256) if size >= batch)
        assert size - batch < max(8, batch / 2)


@pytest.mark.parametrize("steps", [[7, 3, 1, 8, 5], [1, 2, 4], [8, 1, 8]])
def test_a_replayed_step_is_the_step(decoder, steps):
    """Its logits and all that it writes, whatever the steps before have left in the buffers."""
    ours, plain = cache_of(decoder), cache_of(decoder)
    replayed = graphed(decoder, ours)
    for cache in (ours, plain):
        generator = torch.Generator().manual_seed(1)
        for entries in (cache.keys, cache.values):
            entries.copy_(torch.randn(entries.shape, generator=generator))
    for step, count in enumerate(steps):
        lengths = [1 + (5 * step + 7 * row) % (TABLE_WIDTH * BLOCK_TOKENS) for row in range(count)]
        batch = decodes(lengths, seed=step)
        expected = decoder.forward(batch, plain)
        torch.testing.assert_close(replayed.forward(batch, ours), expected, atol=1e-5, rtol=1e-5)
    assert replayed.replayed == len(steps)
    for kept, expected in ((ours.keys, plain.keys), (ours.values, plain.values)):
        torch.testing.assert_close(kept[:, :BLOCKS], expected[:, :BLOCKS], atol=1e-5, rtol=1e-5)


def test_only_the_wanted_rows_come_back_in_their_order(decoder):
    replayed = graphed(decoder, cache_of(decoder))
    lengths = [3, 9, 14, 2, 21]
    every = replayed.forward(decodes(lengths), replayed._cache).clone()
    for wanted in ([4, 0], [2], [], [0, 1]):
        assert torch.equal(replayed.forward(decodes(lengths, wanted), replayed._cache), every[wanted])


def test_what_no_graph_was_recorded_for_is_computed(decoder):
    cache = cache_of(decoder)
    replayed = graphed(decoder, cache)
    many = decodes([3] * 9)
    assert replayed.forward(many, cache).shape[0] == 9
    prompt = torch.arange(4)
    batch = ForwardBatch(prompt, prompt, prompt, prompt[-1:], chunks=[BatchChunk(0, 4, 0, [0])])
    assert replayed.forward(batch, cache).shape[0] == 1
    assert replayed.replayed == 0


def answers(engine):
    for number in range(13):
        sampling = SamplingParams(
            max_tokens=8 + 3 * number, seed=number, temperature=number % 2, top_p=0.9, ignore_eos=True
        )
        prompt = [4 + (number * 7 + position) % 120 for position in range(1 + number * 5)]
        engine.submit("test", EngineRequest(id=str(number), prompt=prompt, sampling=sampling))
    tokens: dict[str, list[int]] = {}
    while engine.busy:
        for output in engine.step().get("test", []):
            tokens.setdefault(output.request_id, []).extend(output.delta.tokens)
    assert engine.load().free_blocks == engine.load().total_blocks
    return tokens


def test_an_engine_answers_the_same_on_kernels_of_a_cpu_on_those_of_a_gpu_and_with_graphs(folder):
    config = EngineConfig(
        device="cpu", dtype="fp32", threads=1, kv_memory_bytes=2 << 20, step_tokens=64, max_sequences=16
    )
    expected = answers(build(folder, config)[0])
    engine, _ = build(folder, config, target=ComputeDevice(torch.device("cpu"), accelerated=True))
    assert answers(engine) == expected
    runner = engine._runner
    plain, cache = runner._model
    replayed = GraphedDecoder(
        plain._decoder,
        cache,
        sizes=[1, 2, 4, 8, 12],
        table_width=-(-plain._decoder.config.context_tokens // cache.block_tokens),
        make_graph=Rerun,
    )
    runner.reload(replayed, cache)
    before = engine.load().steps
    assert answers(engine) == expected
    assert replayed.replayed > 0.7 * (engine.load().steps - before)
