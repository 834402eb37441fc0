"""Small random models, saved as their own library saves them.

Encoders, and the decoders of `benchmarks.support.families`.
"""

from pathlib import Path

import tokenizers
import torch
import transformers

from benchmarks.support.families import FAMILIES, make_model

__all__ = ["ENCODERS", "FAMILIES", "make_encoder", "make_model", "save_words"]

_ENCODER = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}

ENCODERS: dict[str, tuple[str, dict]] = {
    "bert": ("Bert", {}),
    "bert_tanh": ("Bert", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "bert_relu": ("Bert", {"hidden_act": "relu", "type_vocab_size": 1}),
    "roberta": ("Roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm_roberta": ("XLMRoberta", {"pad_token_id": 1, "type_vocab_size": 1}),
}


def make_encoder(folder: Path, family: str = "bert", *, head: bool = False) -> "transformers.PreTrainedModel":
    """Saves a random encoder of `family` into `folder` and returns the library's own model as an oracle.

    Args:
        folder: Created if need be.
        family: A key of `ENCODERS`.
        head: Save it with the head of masked language models, which is no part of the encoder.
    """
    class_name, fields = ENCODERS[family]
    config = getattr(transformers, f"{class_name}Config")(**{**_ENCODER, **fields})
    torch.manual_seed(sum(map(ord, family)))
    model = getattr(transformers, f"{class_name}{'ForMaskedLM' if head else 'Model'}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "LayerNorm" in name or name.endswith("bias"):  # all ones and zeros would hide a fault
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model.base_model if head else model


def save_words(folder: Path) -> None:
    """Saves a WordPiece tokenizer for these encoders: letters, digits and a few words."""
    letters = [chr(97 + i) for i in range(26)] + [str(i) for i in range(10)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", ",", "."]
    table = [*words, *letters, *(f"##{letter}" for letter in letters)]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: index for index, word in enumerate(table)}, unk_token="[UNK]")
    )
    backend.add_special_tokens(words[:4])
    backend.normalizer = tokenizers.normalizers.BertNormalizer()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.enable_truncation(8)  # as such files have it; what is longer must be refused, not cut
    backend.save(str(folder / "tokenizer.json"))
