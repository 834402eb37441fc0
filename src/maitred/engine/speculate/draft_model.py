"""Drafts of a smaller model with the same vocabulary (Leviathan et al., ICML'23; Chen et al., 2023).

The draft model continues each text token by token, and the target model then computes the whole continuation in one
step. Its tokens are sampled like those of the target model: by the same sampler, with the random bits of the same
positions, the same penalties and the same masks. So where both models have similar probabilities, they mostly draw the
same token, because they use common random numbers.

The draft model reads a sequence only when drafts for it are requested. Unread tokens, such as a new prompt or tokens
from a time when the batch was too full for drafts, are read in chunks. Drafts begin when all tokens are read.
"""

from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from maitred.core.clock import Clock
from maitred.engine.grammar.constraints import Constraints
from maitred.engine.models.batch import BatchChunk, ForwardBatch
from maitred.engine.models.decoder import Decoder
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.sampling.sampler import Sampler
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.step_times import StepMeter, StepWork
from maitred.engine.speculate.draft_position import DraftModelPosition
from maitred.engine.speculate.guess import DraftRequest

_WORTH_READING = 8
"""Maximum tokens to read per output token that the answer can still have. Reading more would cost more time than drafts
save."""


class _Run(NamedTuple):
    """Run of one sequence's tokens to read."""

    sequence: Sequence
    start: int
    tokens: list[int]


class DraftModel:
    """Draft model that writes drafts. Implements `maitred.engine.speculate.guess.DraftAuthor`.

    Args:
        decoder: The smaller model.
        cache: KV cache of the draft model, with as many blocks as that of the target model.
        sampler: Sampler of the target model.
        constraints: Grammar states of the sequences.
        clock: Clock that measures the passes.
        vocab_size: Vocabulary size of the target model. The draft model may have fewer or more columns, because
            checkpoints round this number up.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        sampler: Sampler,
        constraints: Constraints,
        clock: Clock,
        vocab_size: int,
    ) -> None:
        self._model: tuple[Decoder, KVCache] | None = decoder, cache
        self._context_tokens = decoder.config.context_tokens
        self._sampler = sampler
        self._constraints = constraints
        self._clock = clock
        self._vocab_size = vocab_size
        self._reading = DraftModelPosition(cache.block_tokens)
        self._meter = StepMeter()

    def pass_s(self, sequences: int, context_tokens: int) -> float:
        """Returns the seconds of one further token for these sequences; implements `DraftAuthor.pass_s`."""
        return self._meter.times.decoding(sequences, context_tokens)

    def follows(self, sequence: Sequence, most: int) -> bool:
        """Returns whether it can follow a sequence at low cost; implements `DraftAuthor.follows`."""
        if sequence.key not in self._sampler:
            return False  # the sequence starts or resumes in this step
        tokens = len(sequence.tokens)
        left = sequence.max_tokens - sequence.output_tokens
        short_enough = tokens + most <= self._context_tokens
        return short_enough and tokens - self._reading.position(sequence) <= _WORTH_READING * left

    def write(self, wanted: list[DraftRequest], most_tokens: int) -> None:
        """Writes drafts for sequences; implements `DraftAuthor.write`."""
        runs, writing = [], []
        for want in wanted:
            sequence = want.sequence
            read = self._reading.position(sequence)
            unread = sequence.tokens[read : read + most_tokens]
            if unread:
                most_tokens -= len(unread)
                runs.append(_Run(sequence, read, unread))
                if read + len(unread) == len(sequence.tokens):
                    writing.append(want)
        self._write(runs, writing)

    def forget(self, sequence: Sequence) -> None:
        """Forgets a sequence; implements `DraftAuthor.forget`."""
        self._reading.forget(sequence)

    def drop(self) -> None:
        """Releases the weights and the KV cache until `reload`; no sequence may be running."""
        self._model = None
        self._reading.clear()

    def reload(self, decoder: Decoder, cache: KVCache) -> None:
        """Restores the same model, with an empty KV cache of the same size."""
        self._model = decoder, cache

    def _write(self, runs: list[_Run], writing: list[DraftRequest]) -> None:
        ahead: dict[int, list[int]] = {}
        first = runs
        while runs:
            start_s = self._clock.monotonic_s()
            for run in runs:
                self._reading.begin(run.sequence, run.start, run.start + len(run.tokens))
            logits = self._forward(runs, [want.sequence.key for want in writing])
            chosen = self._choose(logits, writing) if writing else []
            self._measure(runs, self._clock.monotonic_s() - start_s)
            runs, further = [], []
            for want, token in zip(writing, chosen, strict=True):
                supposition = want.supposition
                before = len(supposition.tokens)
                supposition.take(token, want.most)
                if token in want.sequence.stop_tokens:
                    supposition.open = False
                if supposition.open and len(supposition.tokens) < want.length:
                    place = len(want.sequence.tokens) + before
                    runs.append(_Run(want.sequence, place, supposition.tokens[before:]))
                    ahead[want.sequence.key] = supposition.tokens[:]
                    further.append(want)
            writing = further
        for run in first:
            end = run.start + len(run.tokens)
            self._reading.done(run.sequence, end, ahead.get(run.sequence.key, []))

    def _choose(self, logits: Tensor, writing: list[DraftRequest]) -> list[int]:
        suppositions = [want.supposition for want in writing]
        keys = [want.sequence.key for want in writing]
        positions = [want.sequence.output_tokens + len(want.supposition.tokens) for want in writing]
        masks = self._constraints.masks_behind(suppositions, positions)
        supposed = {row: supposition.tokens for row, supposition in enumerate(suppositions) if supposition.tokens}
        return self._sampler.sample(logits, keys, positions, masks, supposed, scored=False).tokens

    def _forward(self, runs: list[_Run], choosing: Items[int]) -> Tensor:
        """Reads the runs; returns the logits behind the runs in `choosing`, in its order."""
        assert self._model is not None, "asleep"
        decoder, cache = self._model
        logits = decoder.forward(_batch(runs, choosing, decoder, cache), cache)
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self._vocab_size]

    def _measure(self, runs: list[_Run], seconds: float) -> None:
        """Records the seconds of a further token, only for passes that read no earlier tokens."""
        if seconds > 0 and all(len(run.tokens) == 1 for run in runs):
            self._meter.record(StepWork(len(runs), sum([run.start + 1 for run in runs])), seconds)


def _batch(runs: list[_Run], choosing: Items[int], decoder: Decoder, cache: KVCache) -> ForwardBatch:
    """Makes a batch: runs of one token are decodes and come first, as in the model runner."""
    device, block_tokens = decoder.device, cache.block_tokens
    singles = [run for run in runs if len(run.tokens) == 1]
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    chunks: list[BatchChunk] = []
    last_row: dict[int, int] = {}
    for run in singles + [run for run in runs if len(run.tokens) > 1]:
        blocks = run.sequence.table.blocks
        if len(run.tokens) > 1:
            chunks.append(BatchChunk(len(tokens), len(run.tokens), run.start, blocks))
        own = range(run.start, run.start + len(run.tokens))
        tokens += run.tokens
        positions += own
        slots += [blocks[place // block_tokens] * block_tokens + place % block_tokens for place in own]
        last_row[run.sequence.key] = len(tokens) - 1
    width = max([len(run.sequence.table.blocks) for run in singles], default=0)
    tables = [run.sequence.table.blocks + [0] * (width - len(run.sequence.table.blocks)) for run in singles]
    known = decoder.config.vocab_size - 1
    return ForwardBatch(
        token_ids=torch.tensor(tokens, device=device).clamp_(max=known),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        logit_rows=torch.tensor([last_row[key] for key in choosing], dtype=torch.int64, device=device),
        num_decodes=len(singles),
        decode_tables=torch.tensor(tables, dtype=torch.int32, device=device).view(len(singles), width),
        decode_lengths=torch.tensor([run.start + 1 for run in singles], dtype=torch.int32, device=device),
        chunks=chunks,
    )
