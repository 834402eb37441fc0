"""Log-probabilities of every place of an answer that is given, from one step of a decoder."""

from collections.abc import Sequence

import torch
from torch import Tensor

from maitred.engine.models.batch import BatchChunk, ForwardBatch
from maitred.engine.models.decoder import Decoder
from maitred.engine.models.kv_cache import KVCache

_BLOCK_TOKENS = 16


def forced_log_probabilities(decoder: Decoder, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Returns the log-probabilities of all tokens at each place of the answer, ``[answer, vocabulary]``."""
    tokens = [*prompt, *answer[:-1]]
    blocks = list(range(-(-len(tokens) // _BLOCK_TOKENS)))
    cache = KVCache(decoder.config, len(blocks), _BLOCK_TOKENS, decoder.dtype, decoder.device)
    batch = ForwardBatch(
        token_ids=torch.tensor(tokens),
        positions=torch.arange(len(tokens)),
        slots=torch.arange(len(tokens)),
        logit_rows=torch.arange(len(prompt) - 1, len(tokens)),
        num_decodes=0,
        decode_tables=torch.zeros(0, 0, dtype=torch.int32),
        decode_lengths=torch.zeros(0, dtype=torch.int32),
        chunks=[BatchChunk(0, len(tokens), 0, blocks)],
    )
    return torch.log_softmax(decoder.forward(batch, cache).double(), dim=-1)
