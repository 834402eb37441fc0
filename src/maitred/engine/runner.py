"""Model runner: turns a step's plan into tensors, runs the model and samples tokens."""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maitred.core.request import TokenLogprobs
from maitred.engine.block_table_rows import BlockTableRows
from maitred.engine.grammar.constraints import Constraints
from maitred.engine.models import batch
from maitred.engine.models.batch import ForwardBatch, WindowBlocks
from maitred.engine.models.host_blocks import HostBlocks
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.sampling.prompt_logprobs import PromptScorer
from maitred.engine.sampling.sampler import Sampler
from maitred.engine.scheduler.plan import Chunk, StepPlan
from maitred.engine.scheduler.sequence import Sequence

_ALL_BANNED = (
    "No token is left to choose: allowed_token_ids, bad_words, min_tokens and the form of the answer exclude all. "
    "Allow more tokens, such as the one that ends the answer."
)


class ForwardModel(Protocol):
    """Model that computes a step; see `Decoder`."""

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Computes the logits that the batch asks for, which are valid until the next step."""
        ...


class ModelRunner:
    """Runner that computes step plans on a model.

    Args:
        decoder: The model.
        cache: KV cache of the model.
        sampler: Chooses tokens.
        lanes: Block tables of the running sequences.
        window_lanes: Their tables for layers with a window; None: these layers use the same blocks as all.
        block_tokens: Tokens per block.
        eos_token_ids: End-of-sequence tokens of the model.
        constraints: Grammar states of the sequences.
        host_blocks: Host memory for swapped blocks of preempted sequences; None: there is no swapping.
    """

    def __init__(
        self,
        decoder: ForwardModel,
        cache: KVCache,
        sampler: Sampler,
        lanes: BlockTableRows,
        *,
        block_tokens: int,
        eos_token_ids: tuple[int, ...],
        constraints: Constraints,
        host_blocks: HostBlocks | None = None,
        window_lanes: BlockTableRows | None = None,
    ) -> None:
        self._model: tuple[ForwardModel, KVCache] | None = decoder, cache
        self._sampler = sampler
        self._rows = lanes
        self._window_rows = window_lanes
        self._block_tokens = block_tokens
        self._eos_token_ids = eos_token_ids
        self._constraints = constraints
        self._host_blocks = host_blocks

    def execute(self, plan: StepPlan) -> tuple[list[list[int]], list[list[TokenLogprobs] | None]]:
        """Computes one step plan; implements `PlanRunner.execute`."""
        for chunk in plan.chunks:
            if chunk.sequence not in self._rows:
                self._begin(chunk.sequence)
        sampling = plan.sampling
        # If the grammar forces the first tokens of an answer, its prompt is computed but nothing is sampled. Nor is
        # anything sampled if the request wants no output.
        forced: dict[int, list[int]] = {}
        if self._constraints.active:
            forced = {key: must for chunk in sampling if (must := self._constraints.opening(key := chunk.sequence.key))}
        forced |= {chunk.sequence.key: [] for chunk in sampling if not chunk.sequence.max_tokens}
        drawn = [chunk for chunk in sampling if chunk.sequence.key not in forced] if forced else sampling
        keys: list[int] = []
        positions: list[int] = []
        supposed: dict[int, tuple[int, ...]] = {}
        for chunk in drawn:
            first = chunk.sequence.output_tokens
            for ahead in chunk.draws:
                if ahead:
                    supposed[len(keys)] = chunk.drafts[:ahead]
                keys.append(chunk.sequence.key)
                positions.append(first + ahead)
        masks = self._constraints.start(keys, positions)
        assert self._model is not None, "asleep"
        decoder, cache = self._model
        if self._host_blocks is not None:
            self._host_blocks.move(cache, plan.moves, plan.window_moves)
        greedy = masks is None and bool(keys) and self._sampler.greedy(keys)
        step = self._batch(plan, drawn, greedy=greedy)
        if self._window_rows is not None:
            step.window = self._window_blocks(plan, step.positions, self._window_rows)
        scoring = [chunk for chunk in plan.prefills if chunk.scored_rows]
        prompt_scores = self._score_prompts(plan, step) if scoring else None
        logits = decoder.forward(step, cache)
        if prompt_scores is not None:
            for chunk, prompt_logprobs in zip(scoring, prompt_scores.take(map(_scored_part, scoring)), strict=True):
                chunk.prompt_logprobs = prompt_logprobs
        if not sampling:
            return [], []
        result = self._sampler.sample(logits, keys, positions, None if masks is None else masks.result(), supposed)
        banned = {*result.banned}
        tokens: list[list[int]] = []
        logprobs: list[list[TokenLogprobs] | None] = []
        row = 0
        for chunk in sampling:
            key = chunk.sequence.key
            own = forced.get(key)
            scores: list[TokenLogprobs] = []
            if own is None:
                if chunk.drafts:
                    own, draws = self._follow(chunk, result.tokens, row)
                else:
                    own, draws = [result.tokens[row], *self._constraints.advance(key, result.tokens[row])], 1
                scores = [score for score in result.logprobs[row : row + draws] if score is not None]
                if not banned.isdisjoint(range(row, row + draws)):
                    self._constraints.fail(key, _ALL_BANNED)
                row += len(chunk.draws)
            self._sampler.extend(key, own)
            tokens.append(own)
            logprobs.append(scores or None)
        return tokens, logprobs

    def forget(self, sequence: Sequence) -> None:
        """Forgets a sequence; implements `PlanRunner.forget`."""
        if sequence in self._rows:
            self._rows.release(sequence)
            if self._window_rows is not None:
                self._window_rows.release(sequence)
            self._sampler.remove(sequence.key)
            self._constraints.remove(sequence.key)

    def _follow(self, chunk: Chunk, sampled: list[int], row: int) -> tuple[list[int], int]:
        """Returns the tokens that follow a chunk with drafts, and how many of its sampled rows are valid.

        Tokens that were sampled behind a rejected draft are invalid, because their context differs from the answer.

        Args:
            chunk: Chunk that samples and has drafts.
            sampled: Sampled tokens of all rows.
            row: First row of the chunk in `sampled`.
        """
        key = chunk.sequence.key
        own: list[int] = []
        draws = 0
        for ahead in chunk.draws:
            if ahead != len(own) or tuple(own) != chunk.drafts[:ahead]:
                break
            token = sampled[row + draws]
            own += [token, *self._constraints.advance(key, token)]
            draws += 1
        return own, draws

    def drop(self) -> None:
        """Releases the weights and the KV cache until `reload`; no sequence may be running."""
        self._model = None

    def reload(self, decoder: ForwardModel, cache: KVCache) -> None:
        """Restores the same model, with an empty KV cache of the same size."""
        self._model = decoder, cache

    def _begin(self, sequence: Sequence) -> None:
        output = sequence.tokens[sequence.prompt_tokens :]
        self._rows.take(sequence)
        if self._window_rows is not None:
            self._window_rows.take(sequence)
        self._sampler.add(
            sequence.key, sequence.sampling, sequence.index, sequence.request.prompt, output, self._eos_token_ids
        )
        self._constraints.add(sequence.key, sequence.sampling, output)

    def _batch(self, plan: StepPlan, drawn: list[Chunk], *, greedy: bool) -> ForwardBatch:
        """Makes a batch: decodes of one token first, then longer chunks in order, each with its drafts.

        Args:
            plan: Plan of the step.
            drawn: Chunks to sample from, at their last row and at the rows of their drafts.
            greedy: See `ForwardBatch`.
        """
        singles, longer = _rows_in_order(plan)
        tokens = [chunk.sequence.tokens[chunk.start] for chunk in singles]
        starts = np.array([chunk.start for chunk in singles], np.int64)
        tables = self._rows.tables(singles)
        newest = tables[np.arange(len(singles)), starts // self._block_tokens].astype(np.int64)
        positions, slots = [starts], [self._slots(newest, starts)]
        last_row = {chunk.sequence.key: row for row, chunk in enumerate(singles)}
        chunks = []
        for chunk in longer:
            length = chunk.length + len(chunk.drafts)
            own = np.arange(chunk.start, chunk.start + length)
            blocks = np.asarray(chunk.sequence.table.blocks, dtype=np.int64)
            positions.append(own)
            slots.append(self._slots(blocks[own // self._block_tokens], own))
            chunks.append(batch.BatchChunk(len(tokens), length, chunk.start, chunk.sequence.table.blocks))
            tokens += chunk.sequence.tokens[chunk.start : chunk.end]
            last_row[chunk.sequence.key] = len(tokens) - 1
            tokens += chunk.drafts
        logit_rows: list[int] = []
        for chunk in drawn:
            row = last_row[chunk.sequence.key]
            logit_rows += [row + ahead for ahead in chunk.draws] if chunk.drafts else [row]
        return ForwardBatch(
            token_ids=torch.from_numpy(np.array(tokens, np.int64)),
            positions=torch.from_numpy(np.concatenate(positions)),
            slots=torch.from_numpy(np.concatenate(slots)),
            num_decodes=len(singles),
            decode_tables=torch.from_numpy(tables),
            decode_lengths=torch.from_numpy((starts + 1).astype(np.int32)),
            chunks=chunks,
            logit_rows=torch.from_numpy(np.array(logit_rows, np.int64)),
            greedy=greedy,
        )

    def _window_blocks(self, plan: StepPlan, positions: Tensor, rows: BlockTableRows) -> WindowBlocks:
        """Returns where the rows of a batch are in the blocks of the layers with a window."""
        singles, longer = _rows_in_order(plan)
        places = positions.numpy()
        tables = rows.tables(singles)
        ends = np.cumsum([len(singles), *(chunk.length + len(chunk.drafts) for chunk in longer)])
        starts = places[: len(singles)]
        blocks = [tables[np.arange(len(singles)), starts // self._block_tokens].astype(np.int64)]
        chunk_tables = [rows.blocks(chunk.sequence) for chunk in longer]
        for table, start, end in zip(chunk_tables, ends[:-1], ends[1:], strict=True):
            blocks.append(np.asarray(table, dtype=np.int64)[places[start:end] // self._block_tokens])
        slots = self._slots(np.concatenate(blocks), places)
        return WindowBlocks(torch.from_numpy(slots), torch.from_numpy(tables), chunk_tables)

    def _score_prompts(self, plan: StepPlan, step: ForwardBatch) -> PromptScorer:
        """Adds the rows to a batch behind which log-probabilities of prompt tokens are wanted; returns their reader."""
        rows: list[int] = []
        targets: list[int] = []
        for chunk, placed in zip(plan.prefills, step.chunks[-len(plan.prefills) :], strict=True):
            own = chunk.scored_rows
            rows += range(placed.start_row + own.start, placed.start_row + own.stop)
            targets += chunk.sequence.tokens[chunk.start + own.start + 1 : chunk.start + own.stop + 1]
        top = max(chunk.sequence.sampling.prompt_logprobs or 0 for chunk in plan.prefills)
        scores = self._sampler.prompt_scores(targets, top)
        step.scored = batch.ScoredRows(torch.from_numpy(np.array(rows, np.int64)), scores.read)
        return scores

    def _slots(self, blocks: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return blocks * self._block_tokens + positions % self._block_tokens


def _rows_in_order(plan: StepPlan) -> tuple[list[Chunk], list[Chunk]]:
    """Returns the chunks of a plan in the order of their rows: decodes of one token, and longer ones."""
    singles = [chunk for chunk in plan.decodes if chunk.length == 1 and not chunk.drafts]
    if len(singles) == len(plan.decodes):
        return singles, plan.prefills
    return singles, [chunk for chunk in plan.decodes if chunk.length > 1 or chunk.drafts] + plan.prefills


def _scored_part(chunk: Chunk) -> tuple[int, int, int]:
    """Returns what `PromptScorer.take` needs to know of a chunk."""
    rows = chunk.scored_rows
    return len(rows), chunk.start + rows.start + 1, chunk.sequence.sampling.prompt_logprobs or 0
