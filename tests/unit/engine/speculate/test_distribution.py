"""The tokens of sampled answers come with the model's own probabilities, whatever was guessed.

Two tokens of each answer, for thousands of seeds, are counted against the probabilities that the model's own library
computes. The third token is of the step in which the second was a draft: where the draft was right, and where it was
not.
"""

import pytest
import torch

from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig
from maitred.engine.speculate.guess import DraftTokens
from maitred.engine.speculate.speculator import Speculator
from tests.support.clock import FakeClock
from tests.support.drafters import Always
from tests.support.models import make_model

PROMPT = [5, 9, 17, 33]
ANSWERS = 6000
SIGNIFICANT = 1e-3


class Favourite:
    """Guesses one and the same token."""

    def __init__(self, token):
        self.token = token

    def draft(self, sequence, most):
        return DraftTokens(sequence.key, 1, (self.token,))  # of a kind of its own: nothing is known against it

    def forget(self, sequence):
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, make_model(folder, "llama3")


@torch.inference_mode()
def exact(oracle):
    """The probabilities of the first token, and those of the second after each first one."""
    first = oracle(torch.tensor([PROMPT])).logits[0, -1].softmax(-1)
    texts = torch.tensor([[*PROMPT, token] for token in range(len(first))])
    return first.double(), oracle(texts).logits[:, -1].softmax(-1).double()


def answers(folder, drafter):
    # Without an objective a slow machine has room for as many drafts as a quick one.
    config = EngineConfig(
        device="cpu", dtype="fp32", threads=1, max_sequences=128, kv_memory_bytes=8 << 20, itl_objective_s=None
    )
    engine, _ = build(folder, config)
    engine._speculator = Speculator(drafter, 1, FakeClock(), worth=Always())
    for seed in range(ANSWERS):
        sampling = SamplingParams(max_tokens=3, seed=seed, ignore_eos=True)
        engine.submit("owner", EngineRequest(id=str(seed), prompt=PROMPT, sampling=sampling))
    outputs = {str(seed): [] for seed in range(ANSWERS)}
    while engine.occupied:
        for output in engine.step().get("owner", []):
            outputs[output.request_id] += output.delta.tokens
    load = engine.load()
    assert 0 < load.accepted_tokens < load.drafted_tokens == ANSWERS
    return list(outputs.values())


def p_value(tokens, probabilities):
    """Of Pearson's test; tokens of which fewer than five are expected count as one."""
    expected = probabilities / probabilities.sum() * len(tokens)
    counts = torch.bincount(torch.tensor(tokens), minlength=len(expected)).double()
    rare = expected < 5
    squares = ((counts - expected) ** 2 / expected)[~rare].sum()
    squares += (counts[rare].sum() - expected[rare].sum()) ** 2 / expected[rare].sum()
    freedom = torch.tensor(float((~rare).sum()), dtype=torch.float64)
    return torch.special.gammaincc(freedom / 2, squares / 2).item()


def test_sampled_tokens_keep_the_distribution(model):
    folder, oracle = model
    first, second = exact(oracle)
    after = first @ second
    outputs = answers(folder, Favourite(int(after.argmax())))
    assert p_value([tokens[0] for tokens in outputs], first) > SIGNIFICANT
    assert p_value([tokens[1] for tokens in outputs], after) > SIGNIFICANT
    assert p_value([tokens[1] for tokens in outputs], first) < SIGNIFICANT, "the test can tell"


def test_what_follows_a_right_guess_keeps_it_too(model):
    folder, oracle = model
    first, second = exact(oracle)
    guessed = int((first @ second).argmax())
    outputs = [tokens for tokens in answers(folder, Favourite(guessed)) if tokens[1] == guessed]
    with torch.inference_mode():
        texts = torch.tensor([[*PROMPT, token, guessed] for token in range(len(first))])
        third = oracle(texts).logits[:, -1].softmax(-1).double()
    of_first = first * second[:, guessed]
    assert p_value([tokens[2] for tokens in outputs], of_first @ third) > SIGNIFICANT
