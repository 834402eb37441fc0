"""The bundled model is complete, small enough to ship, and speaks the forms that it promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import pytest
from tokenizers import Tokenizer

import maitred

FOLDER = Path(maitred.__file__).parent / "bundled" / "maitred-tiny"
LIMIT_BYTES = 10 * 1024 * 1024
FILES = (
    "MODEL_CARD.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def read_json(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return value


def render(messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
    config = read_json("tokenizer_config.json")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    return environment.from_string(config["chat_template"]).render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        bos_token=config["bos_token"],
        eos_token=config["eos_token"],
        raise_exception=raise_exception,
    )


def test_the_folder_is_complete_and_small() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(FILES)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= LIMIT_BYTES


def test_the_configuration_is_a_small_llama() -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["hidden_size"] == 256
    assert config["intermediate_size"] == 704
    assert config["num_hidden_layers"] == 5
    assert config["num_attention_heads"] == 8
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == 32
    assert config["max_position_embeddings"] == 2048
    assert config["vocab_size"] == 4096
    assert config["tie_word_embeddings"] is True
    assert config["torch_dtype"] == "bfloat16"


def test_the_weights_are_those_of_the_configuration() -> None:
    """Read from the header alone: eight bytes of length, then JSON."""
    with (FOLDER / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    assert {entry["dtype"] for entry in tensors.values()} == {"BF16"}
    assert tensors["model.embed_tokens.weight"]["shape"] == [4096, 256]
    assert tensors["model.layers.4.self_attn.k_proj.weight"]["shape"] == [128, 256]
    assert tensors["model.layers.4.mlp.down_proj.weight"]["shape"] == [256, 704]
    assert "lm_head.weight" not in tensors, "the output layer is tied to the embedding"
    assert len(tensors) == 2 + 5 * 9


def test_special_tokens_agree_across_files(tokenizer: Tokenizer) -> None:
    config, generation = read_json("config.json"), read_json("generation_config.json")
    names = read_json("tokenizer_config.json")
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    begin, end = tokenizer.token_to_id(names["bos_token"]), tokenizer.token_to_id(names["eos_token"])
    assert config["bos_token_id"] == generation["bos_token_id"] == begin
    assert config["eos_token_id"] == generation["eos_token_id"] == end
    for role in ("system", "user", "assistant"):
        assert tokenizer.encode(f"<|{role}|>", add_special_tokens=False).tokens == [f"<|{role}|>"]
    assert 0 < generation["temperature"] <= 1


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time, there was a wolf.",
        '"Well!" said Alice,\n\n"after such a fall as this…"',
        "  two  spaces\tand a tab \n",
        "12345 + 678 = 13023",
        "你好，世界。日本語も한국어도",
        "family: 👩‍👩‍👧‍👦, wave: 👋🏽, flag: 🇫🇷",
        "naïve café, Ωmega, עברית",
        "def f(x):\n    return {'a': [x] * 2}\n",
        "\x00\x7f",
        "",
    ],
)
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_plain_text_is_led_by_the_begin_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello").ids
    assert ids[0] == tokenizer.token_to_id("<|begin|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hello"


def test_the_chat_template_renders_roles_and_the_generation_prompt(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " Hello 👋 "},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "A story, please."},
    ]
    conversation = (
        "<|begin|><|system|>Be kind.<|end|><|user|>Hello 👋<|end|><|assistant|>Hi!<|end|>"
        "<|user|>A story, please.<|end|>"
    )
    assert render(messages, add_generation_prompt=False) == conversation
    assert render(messages, add_generation_prompt=True) == conversation + "<|assistant|>"
    tokens = tokenizer.encode(conversation, add_special_tokens=False).tokens
    assert tokens.count("<|end|>") == 4
    assert tokens[0] == "<|begin|>"


def test_the_chat_template_refuses_a_role_that_was_never_trained() -> None:
    with pytest.raises(jinja2.TemplateError, match="system, user and assistant"):
        render([{"role": "tool", "content": "42"}], add_generation_prompt=True)


def test_the_card_names_sources_licences_and_purpose() -> None:
    card = (FOLDER / "MODEL_CARD.md").read_text(encoding="utf-8")
    for phrase in ("public domain", "CC BY 4.0", "Taskmaster", "Google", "not for answers"):
        assert phrase in card
