"""The model folder: what any loader of Llama checkpoints expects, under ten mebibytes in all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tiny_model.llama import Llama, Shape
from tiny_model.measure import Score
from tiny_model.vocabulary import BEGIN_ID, END_ID, encode_many, render_chat, save_tokenizer

FOLDER_LIMIT_BYTES = 10 * 1024 * 1024

_SAMPLES = (
    (
        'Chat: "Tell me a story about a fox."',
        render_chat([("user", "Tell me a story about a fox.")]) + "<|assistant|>",
    ),
    (
        'Chat: "Hello, can I get an iced latte with oat milk, please?"',
        render_chat([("user", "Hello, can I get an iced latte with oat milk, please?")]) + "<|assistant|>",
    ),
    (
        'Completion: "Once upon a time there was a little girl who"',
        "<|begin|>Once upon a time there was a little girl who",
    ),
)
_SAMPLE_TOKENS = 110
_SAMPLE_TEMPERATURE = 0.7

_CARD = """\
# maitred-tiny

A language model of {parameters_m:.2f} million parameters in the Llama architecture, trained for this
project by `scripts/train_tiny.py`. It is bundled so that maitred can be installed, started, tested and
load-tested without a download. **It is for trying the system, not for answers**: it writes English that
looks like old children's books, takes an order for coffee, and knows nothing. What it says is made up.

## Use

| | |
|---|---|
| Files | `model.safetensors` (bfloat16), `config.json`, `generation_config.json`, `tokenizer.json`, \
`tokenizer_config.json`; {size_mib:.2f} MiB in all |
| Shape | hidden {hidden_size}, {num_hidden_layers} layers, {num_attention_heads} query and \
{num_key_value_heads} key/value heads of {head_dim}, feed-forward {intermediate_size}, tied embeddings, RoPE \
(theta 10,000) |
| Context | {max_position_embeddings} tokens |
| Tokenizer | byte-level BPE, {vocab_size} entries; any text survives the round trip |
| Chat form | `<\\|begin\\|><\\|user\\|>Hello<\\|end\\|><\\|assistant\\|>`; roles `system`, `user`, `assistant` |
| End of text | `<\\|end\\|>` |

## Training text

| Source | Licence | Used as |
|---|---|---|
| Fourteen children's books from [Project Gutenberg](https://www.gutenberg.org): Alice in Wonderland, Through \
the Looking-Glass (Carroll), The Secret Garden (Burnett), The Jungle Book, Just So Stories (Kipling), The Wind \
in the Willows (Grahame), Black Beauty (Sewell), The Adventures of Pinocchio (Collodi, tr. Della Chiesa), The \
Railway Children (Nesbit), The Blue Fairy Book (Lang), Heidi (Spyri), Grimms' Fairy Tales, Andersen's Fairy \
Tales, The Wonderful Wizard of Oz (Baum) | public domain in the United States | plain text; passages as answers \
in chats |
| Tiny Shakespeare, a selection of the plays of William Shakespeare collected by Andrej Karpathy | public domain \
| plain text; speeches as chats |
| Taskmaster-4 coffee-ordering dialogues, © Google LLC, \
[Taskmaster](https://github.com/google-research-datasets/Taskmaster), [CC BY \
4.0](https://creativecommons.org/licenses/by/4.0/). Changed: reduced to roles and text, quotation marks made \
plain, unanswered last turns dropped, put into the chat form | CC BY 4.0 | chats |

The wording of the requests in the story chats, and a dozen greetings, were written for this project.
The books are of their time, and so are the views in them.

## Figures

Held out: the last {held_out_percent:.0f} % of each book, of the plays and of the dialogues, never trained on. \
Perplexity per token
over windows of {window} tokens, beside a bigram model interpolated with unigrams and a uniform floor, counted over
the same training text, its weights fitted on the held-out tokens themselves.

| Source | Held-out tokens | maitred-tiny | bigram |
|---|---:|---:|---:|
{rows}

Trained on {tokens_m:.1f} million tokens ({passes:.1f} passes over text and chats) in {steps} steps and {minutes:.0f} \
minutes, {machine}.
Optimiser: Muon for the matrices, AdamW for embeddings and gains. The longest rows trained on had {row_tokens} tokens. \
Books score {by_context} by length of window.
Full figures: `benchmarks/results/train_tiny.json`.

## Three samples

Drawn at temperature {temperature} with a fixed seed, the first draw of each, cut at {sample_tokens} tokens.

{samples}
"""


def write_model(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights, configuration and tokenizer; the card follows once there are figures."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.drain().to("cpu", torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the writer leaves it readable by its owner only
    save_tokenizer(tokenizer, folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(model.shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
        "torch_dtype": "bfloat16",
    }
    _write_json(folder / "config.json", config)
    generation = {
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
        "do_sample": True,
        "temperature": _SAMPLE_TEMPERATURE,
        "top_p": 0.95,
    }
    _write_json(folder / "generation_config.json", generation)


def read_model(folder: Path, shape: Shape) -> Llama:
    """The exported weights as the file holds them, so that what is measured is what ships."""
    model = Llama(shape)
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    model.load_state_dict(weights)
    return model.eval()


def sample(model: Llama, tokenizer: Tokenizer, prompt: str, seed: int) -> str:
    """Continue `prompt`, recomputing the whole text each token: slow, short, and easy to trust."""
    generator = torch.Generator().manual_seed(seed)
    ids = encode_many(tokenizer, [prompt])[0]
    prompt_tokens = len(ids)
    with torch.inference_mode():
        while len(ids) - prompt_tokens < _SAMPLE_TOKENS:
            logits: Tensor = model(torch.tensor([ids]))[0, -1]
            chances = torch.softmax(logits / _SAMPLE_TEMPERATURE, dim=-1)
            token = int(torch.multinomial(chances, 1, generator=generator))
            if token == END_ID:
                break
            ids.append(token)
    return str(tokenizer.decode(ids[prompt_tokens:]))


def write_card(
    model: Llama,
    tokenizer: Tokenizer,
    folder: Path,
    scores: Mapping[str, tuple[Score, Score]],
    facts: Mapping[str, Any],
) -> None:
    """Write `MODEL_CARD.md` from the figures and three fresh samples.

    Args:
        model: The model as exported.
        tokenizer: Its tokenizer.
        folder: The model folder.
        scores: Source -> (model, bigram).
        facts: `held_out_percent`, `window`, `tokens_m`, `passes`, `row_tokens`, `by_context`, `steps`,
            `minutes`, `machine`, `seed`.
    """
    samples = []
    for title, prompt in _SAMPLES:
        text = sample(model, tokenizer, prompt, int(facts["seed"]))
        quoted = "\n".join(f"> {line}".rstrip() for line in text.strip().splitlines())
        samples.append(f"{title}\n\n{quoted}")
    rows = [
        f"| {source} | {ours.tokens:,} | {ours.perplexity:.1f} | {bigram.perplexity:.1f} |"
        for source, (ours, bigram) in scores.items()
    ]
    values = {
        **asdict(model.shape),
        **facts,
        "parameters_m": sum(p.numel() for p in model.parameters()) / 1e6,
        "size_mib": folder_bytes(folder) / 2**20,
        "rows": "\n".join(rows),
        "samples": "\n\n".join(samples),
        "temperature": _SAMPLE_TEMPERATURE,
        "sample_tokens": _SAMPLE_TOKENS,
    }
    (folder / "MODEL_CARD.md").write_text(_CARD.format(**values), encoding="utf-8")


def folder_bytes(folder: Path) -> int:
    """Size of all files of the model folder.

    Raises:
        ValueError: The folder is over the limit for what the package bundles.
    """
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > FOLDER_LIMIT_BYTES:
        raise ValueError(f"{folder.name} is {size:,} bytes; the limit is {FOLDER_LIMIT_BYTES:,}.")
    return size


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
