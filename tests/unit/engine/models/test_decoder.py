"""Our decoder against the models' own library: same checkpoint, same logits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from maitred.engine.models.load import LoadedModel, load_model
from tests.support.models import FAMILIES, make_model
from tests.unit.engine.models.steps import Driver, random_tokens


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    oracle = make_model(folder, request.param)
    return oracle, load_model(folder, dtype=torch.float32)


def oracle_logits(oracle, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(torch.tensor([tokens])).logits[0]


def test_full_prefill(pair):
    oracle, model = pair
    tokens = random_tokens(model.config, 150)
    torch.testing.assert_close(
        Driver(model.decoder).prefill(tokens), oracle_logits(oracle, tokens), atol=1e-4, rtol=1e-4
    )


def test_chunked_prefill(pair):
    oracle, model = pair
    tokens = random_tokens(model.config, 90)
    expected = oracle_logits(oracle, tokens)
    driver = Driver(model.decoder)
    line = driver.open(tokens)
    for length in (1, 30, 7, 32, 20):
        logits = driver.step([], [(line, length)])
        torch.testing.assert_close(logits[0], expected[line.computed - 1], atol=1e-4, rtol=1e-4)
    assert line.computed == 90


def test_mixed_steps(pair):
    """Decodes and chunks of many sequences in one step, each as if it were alone."""
    oracle, model = pair
    driver = Driver(model.decoder, num_blocks=128)
    lines = [driver.open(random_tokens(model.config, 60, seed)) for seed in range(6)]
    expected = [oracle_logits(oracle, line.tokens) for line in lines]
    # Two sequences reach the stage of decoding first; then everything is mixed.
    driver.step([], [(lines[0], 20), (lines[1], 33)])
    while any(line.computed < 58 for line in lines):
        chunks = [
            (line, min(5 + 3 * index, 60 - line.computed)) for index, line in enumerate(lines[2:]) if line.computed < 60
        ]
        decodes = [line for line in lines[:2] if line.computed < 60]
        logits = driver.step(decodes, chunks)
        for row, line in enumerate(decodes + [line for line, _ in chunks]):
            torch.testing.assert_close(
                logits[row], expected[lines.index(line)][line.computed - 1], atol=1e-4, rtol=1e-4
            )


def test_greedy_tokens(pair):
    """64 tokens through the paged cache are the library's own."""
    oracle, model = pair
    prompts = [random_tokens(model.config, length, length) for length in (5, 17, 40)]
    driver = Driver(model.decoder, num_blocks=128)
    lines = [driver.open(prompt) for prompt in prompts]
    logits = driver.step([], [(line, len(line.tokens)) for line in lines])
    for _ in range(63):
        for line, token in zip(lines, logits.argmax(-1).tolist(), strict=True):
            line.tokens.append(token)
        logits = driver.step(lines, [])
    for line, token in zip(lines, logits.argmax(-1).tolist(), strict=True):
        line.tokens.append(token)
    for prompt, line in zip(prompts, lines, strict=True):
        # Greedy tokens are those that the library finds the likeliest at each of their positions.
        expected = oracle_logits(oracle, line.tokens).argmax(-1).tolist()
        assert line.tokens[len(prompt) :] == expected[len(prompt) - 1 : -1]


def test_prefix_written_in_the_same_step(pair):
    """A chunk may read blocks that another chunk of the same step writes."""
    oracle, model = pair
    driver = Driver(model.decoder)
    first = driver.open(random_tokens(model.config, 24))
    tail = random_tokens(model.config, 9, seed=7)
    batch = driver.batch([], [(first, 24)])
    second = driver.open(first.tokens[:20] + tail, shared=first.blocks[:5])
    both = driver.batch([], [(second, 9)])
    from_first = batch.token_ids.numel()
    chunk = both.chunks[0]
    batch.chunks.append(type(chunk)(from_first, chunk.length, chunk.context_before, chunk.block_table))
    batch.token_ids = torch.cat((batch.token_ids, both.token_ids))
    batch.positions = torch.cat((batch.positions, both.positions))
    batch.slots = torch.cat((batch.slots, both.slots))
    batch.logit_rows = torch.tensor([23, from_first + 8])
    logits = driver.decoder.forward(batch, driver.cache)
    torch.testing.assert_close(logits[0], oracle_logits(oracle, first.tokens)[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[1], oracle_logits(oracle, second.tokens)[-1], atol=1e-4, rtol=1e-4)


def test_bfloat16_is_near(tmp_path: Path):
    make_model(tmp_path, "qwen2", initializer_range=0.05)
    exact, rounded = (load_model(tmp_path, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))

    def distribution(model: LoadedModel) -> torch.Tensor:
        driver = Driver(model.decoder)
        line = driver.open(random_tokens(model.config, 40))
        driver.step([], [(line, 39)])
        logits = driver.step([line], [])
        assert logits.dtype == torch.float32
        return logits.softmax(-1)

    assert rounded.decoder.dtype == torch.bfloat16
    torch.testing.assert_close(distribution(rounded), distribution(exact), atol=2e-3, rtol=0.2)


def test_warm_up_leaves_no_trace_in_answers(pair):
    _, model = pair
    tokens = random_tokens(model.config, 10)
    cold, warm = Driver(model.decoder), Driver(model.decoder)
    model.decoder.warm_up(warm.cache)
    assert torch.equal(cold.prefill(tokens), warm.prefill(tokens))


def test_batch_without_rows_to_sample(pair):
    _, model = pair
    driver = Driver(model.decoder)
    line = driver.open(random_tokens(model.config, 10))
    batch = driver.batch([], [(line, 5)])
    batch.logit_rows = torch.zeros(0, dtype=torch.int64)
    assert driver.decoder.forward(batch, driver.cache).shape == (0, model.config.vocab_size)


def test_longrope_of_short_texts(tmp_path):
    """Where no text is longer than the original context, its factors for short ones are used."""
    oracle = make_model(tmp_path, "phi3_longrope", original_max_position_embeddings=64)
    model = load_model(tmp_path, dtype=torch.float32, context_tokens=64)
    tokens = random_tokens(model.config, 60)
    expected = oracle_logits(oracle, tokens)
    torch.testing.assert_close(Driver(model.decoder).prefill(tokens), expected, atol=1e-4, rtol=1e-4)
    longer = load_model(tmp_path, dtype=torch.float32)
    assert (Driver(longer.decoder).prefill(tokens) - expected).abs().max() > 0.1


def test_the_part_for_texts_of_a_model_with_images(tmp_path):
    oracle = make_model(tmp_path, "gemma3")
    config = json.loads((tmp_path / "config.json").read_text())
    text = {name: value for name, value in config.items() if name != "architectures"}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    weights = load_file(tmp_path / "model.safetensors")
    images = {"vision_tower.patch.weight": torch.zeros(3), "multi_modal_projector.norm.weight": torch.zeros(3)}
    for prefix, others in (("language_model.", ""), ("model.language_model.", "model.")):
        renamed = {
            prefix + (name if others == "" else name.removeprefix("model.")): tensor for name, tensor in weights.items()
        }
        extra = {others + name: tensor for name, tensor in images.items()}
        save_file(renamed | extra, tmp_path / "model.safetensors")
        model = load_model(tmp_path, dtype=torch.float32)
        tokens = random_tokens(model.config, 60)
        logits = Driver(model.decoder).prefill(tokens)
        torch.testing.assert_close(logits, oracle_logits(oracle, tokens), atol=1e-4, rtol=1e-4)
