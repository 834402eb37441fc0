"""A minimal driver: sequences with shuffled blocks, turned into batches by hand."""

import random
from dataclasses import dataclass, field

import torch

from maitred.engine.models.batch import BatchChunk, ForwardBatch
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.decoder import Decoder
from maitred.engine.models.kv_cache import KVCache


@dataclass
class Line:
    """One sequence in the cache."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    generated: list[int] = field(default_factory=list)


class Driver:
    """Runs sequences through a decoder, with block tables in random order."""

    def __init__(self, decoder: Decoder, *, num_blocks: int = 64, block_tokens: int = 4, seed: int = 0) -> None:
        self.decoder = decoder
        self.block_tokens = block_tokens
        self.cache = KVCache(decoder.config, num_blocks, block_tokens, decoder.dtype, decoder.device)
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)

    def open(self, tokens: list[int], *, shared: list[int] | None = None) -> Line:
        return Line(list(tokens), list(shared or []), computed=len(shared or []) * self.block_tokens)

    def step(self, decodes: list[Line], chunks: list[tuple[Line, int]]) -> torch.Tensor:
        """Decodes each line's newest token and computes the next `length` tokens of each chunk's line."""
        return self.decoder.forward(self.batch(decodes, chunks), self.cache).clone()

    def batch(self, decodes: list[Line], chunks: list[tuple[Line, int]]) -> ForwardBatch:
        tokens, positions, slots, logit_rows, parts = [], [], [], [], []
        for line, length in [(line, 1) for line in decodes] + chunks:
            end = line.computed + length
            while len(line.blocks) * self.block_tokens < end:
                line.blocks.append(self._free.pop())
            if len(logit_rows) >= len(decodes):
                parts.append(BatchChunk(len(tokens), length, line.computed, list(line.blocks)))
            for position in range(line.computed, end):
                tokens.append(line.tokens[position])
                positions.append(position)
                slots.append(
                    line.blocks[position // self.block_tokens] * self.block_tokens + position % self.block_tokens
                )
            logit_rows.append(len(tokens) - 1)
            line.computed = end
        width = max((len(line.blocks) for line in decodes), default=0)
        tables = [line.blocks + [0] * (width - len(line.blocks)) for line in decodes]
        return ForwardBatch(
            token_ids=torch.tensor(tokens),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            logit_rows=torch.tensor(logit_rows),
            num_decodes=len(decodes),
            decode_tables=torch.tensor(tables, dtype=torch.int32).view(len(decodes), width),
            decode_lengths=torch.tensor([line.computed for line in decodes], dtype=torch.int32),
            chunks=parts,
        )

    def prefill(self, tokens: list[int]) -> torch.Tensor:
        """Logits of every position of a new sequence, from one chunk."""
        line = self.open(tokens)
        batch = self.batch([], [(line, len(tokens))])
        batch.logit_rows = torch.arange(len(tokens))
        return self.decoder.forward(batch, self.cache).clone()


def random_tokens(config: ModelConfig, count: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(config.vocab_size) for _ in range(count)]
