"""The model's vocabulary as llguidance wants it: a trie over the bytes of its tokens."""

from pathlib import Path

import tokenizers
from llguidance import LLTokenizer

from maitred.text.grammar.fault import GrammarFault


def load_vocabulary(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Reads a model's ``tokenizer.json``.

    Takes about a second for 150,000 tokens, in which no other thread of the process runs.

    Args:
        folder: Where the model lies.
        vocab_size: Columns of the model's logits.
        eos_token_ids: How it ends its turn.

    Raises:
        GrammarFault: There is no tokenizer, or not one of bytes.
    """
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.no_truncation()
        backend.no_padding()
        size = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
        return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=list(eos_token_ids))
    except Exception as error:  # Both libraries raise nothing more exact.
        raise GrammarFault(
            f"This model's answers cannot be held to a grammar, as its tokenizer cannot be used: {error}"
        ) from error
