"""The tokenizer: byte-level BPE of 4,096 entries, five of them marks of the chat form.

Byte-level means that no text is out of vocabulary: an emoji or a Chinese character falls apart into
bytes and comes back whole. Words, single digits and runs of punctuation with their line breaks are
kept apart before merging (the scheme that Llama 3 uses), so `."` at the end of a paragraph is one
token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY_SIZE = 4096
BEGIN, SYSTEM, USER, ASSISTANT, END = (
    "<|begin|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
SPECIAL_TOKENS = (BEGIN, SYSTEM, USER, ASSISTANT, END)
BEGIN_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID, END_ID = range(len(SPECIAL_TOKENS))

CONTEXT_TOKENS = 2048

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('This model knows the roles system, user and assistant only.') }}"
    "{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + (message['content'] | trim) + eos_token }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Message = tuple[str, str]
"""(role, text)"""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from `texts`; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN} $B",
        special_tokens=[(BEGIN, BEGIN_ID)],
    )
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise ValueError(
            f"The text yields only {tokenizer.get_vocab_size()} of {VOCABULARY_SIZE} tokens; give more text."
        )
    return tokenizer


def render_chat(messages: Sequence[Message]) -> str:
    """What `CHAT_TEMPLATE` renders, without Jinja: the form in which chats are trained."""
    return BEGIN + "".join(f"<|{role}|>{text.strip()}{END}" for role, text in messages)


def encode_many(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, without the leading `<|begin|>` that a plain encode adds."""
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
