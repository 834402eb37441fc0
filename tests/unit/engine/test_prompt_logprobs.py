"""Log-probabilities of prompts, against those of the library that publishes the models."""

import random
import struct
from collections import defaultdict

import pytest
import torch

from maitred.core.request import EngineRequest, FinishReason, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig
from maitred.engine.device import ComputeDevice
from maitred.engine.models import batch
from maitred.engine.models.batch import ScoredRows
from tests.support.clock import FakeClock
from tests.support.models import make_model

VOCABULARY = 131
SHARED = [4 + 7 * position % 120 for position in range(40)]
CONFIG = {"device": "cpu", "dtype": "fp32", "threads": 1, "block_tokens": 8, "max_sequences": 8}


def requests_of(draw, count):
    """Prompts that share prefixes, most of them longer than a step, with and without output and several choices."""
    return [
        EngineRequest(
            id=str(number),
            prompt=SHARED[: draw.randrange(41)] + [draw.randrange(4, VOCABULARY) for _ in range(draw.randrange(1, 40))],
            sampling=SamplingParams(
                max_tokens=draw.choice([0, 1, 32, 32]),
                seed=number,
                ignore_eos=True,
                n=draw.choice([1, 1, 3]),
                top_logprobs=draw.choice([None, 2]),
                prompt_logprobs=draw.choice([0, 1, 5]),
            ),
        )
        for number in range(count)
    ]


def answered(engine, requests):
    """What is said of each position of each prompt, and the tokens of each choice."""
    for request in requests:
        engine.submit("owner", request)
    said, tokens, ends = defaultdict(list), defaultdict(list), []
    while engine.occupied:
        for output in engine.step().get("owner", []):
            delta = output.delta
            tokens[output.request_id, delta.index] += delta.tokens
            ends += [] if delta.finish is None else [delta.finish]
            if delta.prompt_logprobs is not None:
                assert delta.index == 0, "one choice computes them for all"
                said[output.request_id] += positions(delta.prompt_logprobs)
    assert engine.load().free_blocks == engine.load().total_blocks
    assert set(ends) == {FinishReason.LENGTH}
    assert len(ends) == len(tokens) == sum(request.sampling.n for request in requests)
    return said, tokens


def positions(part):
    """Position, log-probability, rank, and the most probable tokens with theirs."""
    numbers, top = part.count, part.top
    logprobs, ranks = struct.unpack(f"<{numbers}f", part.logprobs), struct.unpack(f"<{numbers}i", part.ranks)
    others = list(
        zip(
            struct.unpack(f"<{numbers * top}i", part.top_tokens),
            struct.unpack(f"<{numbers * top}f", part.top_logprobs),
            strict=True,
        )
    )
    return [(part.start + i, logprobs[i], ranks[i], others[i * top : (i + 1) * top]) for i in range(numbers)]


@pytest.mark.parametrize("accelerated", [False, True])
def test_they_are_those_of_transformers_at_every_position(tmp_path, monkeypatch, accelerated):
    monkeypatch.setattr(batch, "_PIECE_BYTES", 4 * VOCABULARY * 5)  # several pieces in each step
    oracle = make_model(tmp_path, "llama3")
    config = EngineConfig(**CONFIG, bake_off="off", step_tokens=24, kv_memory_bytes=100_000, context_tokens=120)
    target = ComputeDevice(torch.device("cpu"), accelerated=True) if accelerated else None
    engine = build(tmp_path, config, target=target, clock=FakeClock())[0]  # no step is made shorter by its time
    draw = random.Random(3)
    requests = requests_of(draw, 20)
    before = engine.load()
    said, tokens = answered(engine, requests)
    for request in requests:
        expected = torch.log_softmax(oracle(torch.tensor([request.prompt])).logits[0].float(), -1)[:-1]
        assert [position for position, *_ in said[request.id]] == [*range(1, len(request.prompt))]
        for (position, logprob, rank, top), row in zip(said[request.id], expected, strict=True):
            own = row[request.prompt[position]]
            assert logprob == pytest.approx(own.item(), abs=1e-3)
            assert 1 + int((row > own + 1e-4).sum()) <= rank <= 1 + int((row > own - 1e-4).sum())
            best = row.topk(request.sampling.prompt_logprobs)
            assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-3)
            assert [row[token].item() for token, _ in top] == pytest.approx(best.values.tolist(), abs=1e-3)
        for index in range(request.sampling.n):
            assert len(tokens[request.id, index]) == request.sampling.max_tokens
    after = engine.load()
    assert after.preemptions > before.preemptions, "the test is meant to preempt"
    # The same again: their blocks are cached, but what is asked for is computed.
    again, tokens_again = answered(engine, requests)
    for id_, entries in said.items():
        assert [position for position, *_ in again[id_]] == [position for position, *_ in entries]
        logprobs = [logprob for _, logprob, *_ in entries]
        assert [logprob for _, logprob, *_ in again[id_]] == pytest.approx(logprobs, abs=0 if not accelerated else 1e-4)
    assert tokens_again.keys() == tokens.keys()


@pytest.mark.parametrize("scheme", ["none", "int8"])
def test_an_answer_has_the_same_ones_as_a_prompt_and_as_an_answer(tmp_path, scheme):
    make_model(tmp_path, "qwen2")
    engine = build(tmp_path, EngineConfig(**CONFIG, kv_memory_bytes=1 << 20, quantization=scheme))[0]
    sampling = SamplingParams(max_tokens=20, seed=4, ignore_eos=True, top_logprobs=0)
    engine.submit("owner", EngineRequest(id="answer", prompt=SHARED, sampling=sampling))
    tokens, logprobs = [], []
    while engine.occupied:
        for output in engine.step().get("owner", []):
            tokens += output.delta.tokens
            logprobs += [entry.logprob for entry in output.delta.logprobs]
    scored = SamplingParams(max_tokens=0, seed=0, prompt_logprobs=0)
    said, _ = answered(engine, [EngineRequest(id="prompt", prompt=SHARED + tokens, sampling=scored)])
    assert [logprob for _, logprob, _, _ in said["prompt"]][len(SHARED) - 1 :] == pytest.approx(logprobs, abs=1e-3)


def test_one_that_is_cancelled_or_paused_in_its_prompt_leaves_nothing(tmp_path):
    make_model(tmp_path, "llama3")
    engine = build(tmp_path, EngineConfig(**CONFIG, step_tokens=16, kv_memory_bytes=1 << 20))[0]
    scored = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=1)
    for name in ("cancelled", "paused"):
        engine.submit("owner", EngineRequest(id=name, prompt=SHARED * 3, sampling=scored))
    said = []
    for step in range(40):
        if step == 3:
            engine.cancel("owner", "cancelled", None)
            engine.pause("owner", "paused", paused=True)
        if step == 6:
            engine.pause("owner", "paused", paused=False)
        for output in engine.step().get("owner", []):
            if output.request_id == "paused" and output.delta.prompt_logprobs is not None:
                said += positions(output.delta.prompt_logprobs)
    assert [position for position, *_ in said] == [*range(1, len(SHARED) * 3)]
    assert not engine.occupied
    assert engine.load().free_blocks == engine.load().total_blocks


def test_pieces_of_logits_are_bounded():
    rows = ScoredRows(torch.arange(5_000), lambda logits: None)
    pieces = list(rows.pieces(151_936))
    assert [*range(5_000)] == [row for piece in pieces for row in range(*piece.indices(5_000))]
    assert max(piece.stop - piece.start for piece in pieces) * 151_936 * 4 <= 32 << 20
    assert len(list(rows.pieces(1 << 24))) == 5_000
