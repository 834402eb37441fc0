"""The runner on a small model: what it computes of a plan, whatever the shape of the chunks."""

import random

import pytest

from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig
from tests.support.models import make_model


class Foretold:
    """A runner that hands out, beside every token, some that are known to follow it."""

    def __init__(self, runner, answers, draw):
        self.runner = runner
        self.answers = answers
        self.draw = draw
        self.steps = 0

    def execute(self, plan):
        self.steps += 1
        tokens, _ = self.runner.execute(plan)
        for chunk, own in zip(plan.sampling, tokens, strict=True):
            sequence = chunk.sequence
            answer = self.answers[sequence.request.id]
            assert own == [answer[sequence.output_tokens]], "the tokens before were not computed"
            own += answer[sequence.output_tokens + 1 :][: self.draw.randrange(4)]
        return tokens, [None] * len(tokens)

    def forget(self, sequence):
        self.runner.forget(sequence)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, "llama3")
    config = EngineConfig(
        device="cpu", dtype="fp32", threads=1, block_tokens=8, kv_memory_bytes=1 << 20, step_tokens=48, max_sequences=16
    )
    return build(folder, config)[0]


def answers(engine, requests):
    for request in requests:
        engine.submit("owner", request)
    outputs = {request.id: [] for request in requests}
    while engine.occupied:
        for output in engine.step().get("owner", []):
            outputs[output.request_id] += output.delta.tokens
    assert engine.load().free_blocks == engine.load().total_blocks
    return outputs


def test_tokens_that_were_not_sampled_are_computed_like_any_others(engine, monkeypatch):
    requests = [
        EngineRequest(
            id=str(i),
            prompt=[4 + (7 * i + j) % 120 for j in range(1 + 5 * i)],
            sampling=SamplingParams(max_tokens=60, seed=i, temperature=i % 2, ignore_eos=True),
        )
        for i in range(16)
    ]
    before = engine.load()
    expected = answers(engine, requests)
    plain_steps = engine.load().steps - before.steps
    foretold = Foretold(engine._runner, expected, random.Random(0))
    monkeypatch.setattr(engine, "_runner", foretold)
    assert answers(engine, requests) == expected
    assert foretold.steps < 0.75 * plain_steps
