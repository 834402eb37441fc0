"""Sampler: chooses the next token of every sequence in a step.

A row's token depends only on its logits, its parameters and (seed, choice, position). The other rows, the row's index
in the batch, earlier preemptions and the replica have no influence. `fixed_point` makes sums independent of their
order, and `philox` makes random bits independent of history.

Order of the stages::

    raw logits ─> log-probabilities for the rows that ask
        │
    grammar                          engine.grammar.masks
    penalties, bias, bans            edits
    temperature                      draw
    top_k, then top_p, then min_p    host_rows on a CPU, device_rows on an accelerator
        │
    inverse of the cumulative distribution, tokens in order of their ids

top_k breaks ties in favour of the lower id and keeps exactly k. top_p keeps the smallest set, most probable first,
that reaches its share of what top_k left. min_p is relative to the most probable token. The best token survives every
filter.

Parameters are converted to arrays once for a set of rows, and reused while the same rows come in the same order. So in
a stable batch only rows with edits or log-probabilities need work in Python.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from maitred.core.errors import Bug
from maitred.core.request import SamplingParams, TokenLogprobs
from maitred.engine.grammar.masks import RowMasks
from maitred.engine.sampling.device_rows import DeviceRows
from maitred.engine.sampling.draw import DrawParameters
from maitred.engine.sampling.edits import RowEdits
from maitred.engine.sampling.fixed_point import INDEX_BITS
from maitred.engine.sampling.host_rows import HostRows
from maitred.engine.sampling.logprobs import LogprobRows
from maitred.engine.sampling.philox import random_bits
from maitred.engine.sampling.prompt_logprobs import PromptScorer
from maitred.engine.sampling.row_kernels import NOT_A_NUMBER

_NOTHING: Mapping[int, Sequence[int]] = {}


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Result of sampling in one step.

    Attributes:
        tokens: One per row.
        logprobs: One per row; None for rows that did not ask.
        banned: Rows whose request bans every token, so that their tokens are invalid.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    banned: Sequence[int] = ()


class Sampler:
    """Sampler with the sampling state of each sequence.

    Args:
        vocab_size: Number of columns of the logits.
        device: Device of the logits.
        accelerated: Whether to sample with tensor operations, as on every device other than a CPU.
    """

    def __init__(self, vocab_size: int, device: torch.device, *, accelerated: bool = False) -> None:
        if not 0 < vocab_size <= 1 << INDEX_BITS:
            raise Bug(f"The sampler takes vocabularies of 1 to {1 << INDEX_BITS} tokens, not {vocab_size}.")
        self._vocab_size = vocab_size
        self._device = device
        self._on_device = accelerated or device.type != "cpu"
        self._rows: dict[int, _Row] = {}
        self._layout: _Layout | None = None
        self._helpers = torch.get_num_threads() - 1 if device.type == "cpu" else 0
        self._pool = ThreadPoolExecutor(max(self._helpers, 1), thread_name_prefix="sampler")
        self._warm_up()

    def __contains__(self, key: int) -> bool:
        return key in self._rows

    def add(
        self,
        key: int,
        params: SamplingParams,
        choice_index: int,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """Adds a sequence when it starts or resumes; a sequence with the same key is replaced.

        Args:
            key: Key of the sequence in calls of `sample` and `remove`.
            params: Sampling parameters of its request.
            choice_index: Index of its choice in the request.
            prompt: Tokens of the prompt.
            output: Output tokens so far.
            eos_token_ids: End-of-sequence tokens of the model.
        """
        self.remove(key)
        edits = None
        if RowEdits.is_needed(params):
            ending = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
            edits = RowEdits(params, prompt, output, ending, vocab_size=self._vocab_size)
        self._rows[key] = _Row(params, choice_index, edits)

    def remove(self, key: int) -> None:
        """Forgets a sequence; an unknown key is ignored."""
        if self._rows.pop(key, None) is not None and self._layout is not None and key in self._layout.keys:
            self._layout = None

    def extend(self, key: int, tokens: Iterable[int]) -> None:
        """Records new tokens of a sequence for its penalties."""
        edits = self._rows[key].edits
        if edits is not None:
            for token in tokens:
                edits.record(token)

    def greedy(self, keys: Sequence[int]) -> bool:
        """Returns whether all these sequences are sampled greedily from unedited logits."""
        return self._layout_of(list(keys)).greedy

    @torch.inference_mode()  # the logits were made in inference mode, so they can be edited only in it
    def sample(
        self,
        logits: Tensor,
        keys: Sequence[int],
        positions: Sequence[int],
        masks: RowMasks | None = None,
        supposed: Mapping[int, Sequence[int]] = _NOTHING,
        *,
        scored: bool = True,
    ) -> SampleResult:
        """Chooses one token per row. A later call of `extend` records the tokens that are accepted.

        Args:
            logits: [rows, vocabulary]. Consumed: rows with penalties, bias or `min_tokens` are edited in place.
            keys: Key of each row's sequence; any added sequences, in any order.
            positions: Number of output tokens of each row so far, draft tokens included.
            masks: Allowed tokens of the constrained rows; None: all tokens are allowed.
            supposed: Row -> draft tokens that the row assumes behind its sequence's tokens.
            scored: Whether to compute the log-probabilities that rows request.

        Raises:
            Bug: A row holds a NaN or +inf, the shapes disagree, or a key is unknown.
        """
        keys = list(keys)
        if not keys:
            return SampleResult([], [])
        if logits.shape != (len(keys), self._vocab_size) or len(positions) != len(keys):
            raise Bug(
                f"The sampler got logits of shape {tuple(logits.shape)} and {len(positions)} positions for "
                f"{len(keys)} sequences and a vocabulary of {self._vocab_size}."
            )
        layout = self._layout_of(keys)
        logits = logits.to(torch.float32).contiguous()
        read = None if layout.logprobs is None or not scored else layout.logprobs.observe(logits)
        if masks is not None:
            masks.apply(logits)
        banned = layout.edit(logits, positions, supposed)
        tokens = layout.draw(logits, positions)
        if NOT_A_NUMBER in tokens:
            raise Bug(
                f"The model computed NaN or infinite logits in row {tokens.index(NOT_A_NUMBER)} of {len(tokens)}. "
                "Check the weights and the dtype (fp32 has the widest range)."
            )
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if layout.logprobs is not None and read is not None:
            rows = layout.logprobs.rows
            for row, entry in zip(rows, read([tokens[row] for row in rows]), strict=True):
                logprobs[row] = entry
        return SampleResult(tokens, logprobs, banned)

    def prompt_scores(self, targets: Sequence[int], top: int) -> PromptScorer:
        """Makes the reader of the logits behind which these prompt tokens stand; see `PromptScorer`."""
        pool = None if self._on_device else self._pool
        return PromptScorer(targets, min(top, self._vocab_size), pool, self._helpers)

    def _rows_form(self, parameters: DrawParameters) -> HostRows | DeviceRows:
        if self._on_device:
            return DeviceRows(parameters, self._device)
        return HostRows(parameters, self._pool, self._helpers)

    def _warm_up(self) -> None:
        """Compiles or loads every kernel now, so that the first request does not wait for it."""
        params = SamplingParams(max_tokens=1, seed=0, top_p=0.5, repetition_penalty=2.0, top_logprobs=1)
        self.add(0, params, 0, prompt=[0])
        self.sample(torch.zeros((1, self._vocab_size), device=self._device), [0], [0])
        self.remove(0)
        self.prompt_scores([0], 1).read(torch.zeros((1, self._vocab_size), device=self._device))

    def _layout_of(self, keys: list[int]) -> "_Layout":
        if self._layout is None or self._layout.keys != keys:
            unknown = [key for key in keys if key not in self._rows]
            if unknown:
                raise Bug(f"The sampler was asked for sequences that were not added: {unknown[:8]}.")
            rows = [self._rows[key] for key in keys]
            parameters = DrawParameters.of([row.params for row in rows], [row.choice_index for row in rows])
            self._layout = _Layout(keys, rows, parameters, form=self._rows_form(parameters), device=self._device)
        return self._layout


@dataclass(frozen=True, slots=True)
class _Row:
    params: SamplingParams
    choice_index: int
    edits: RowEdits | None


class _Layout:
    """Data of an ordered set of rows that does not change between steps."""

    def __init__(
        self,
        keys: list[int],
        rows: Sequence[_Row],
        parameters: DrawParameters,
        form: HostRows | DeviceRows,
        device: torch.device,
    ) -> None:
        self.keys = keys
        self.edits = [(i, row.edits) for i, row in enumerate(rows) if row.edits is not None]
        asking = [(i, row.params.top_logprobs) for i, row in enumerate(rows) if row.params.top_logprobs is not None]
        edited = {i for i, _ in self.edits}
        self.logprobs = LogprobRows([i for i, _ in asking], [k for _, k in asking], edited, device) if asking else None
        self._parameters = parameters
        self._form = form
        self._unrandom = not parameters.scales.any()
        self.greedy = self._unrandom and not self.edits and self.logprobs is None
        self._no_bits = np.zeros(len(rows), np.int64)

    def edit(self, logits: Tensor, positions: Sequence[int], supposed: Mapping[int, Sequence[int]]) -> list[int]:
        """Edits the logits; returns the rows in which every token is banned."""
        return [i for i, edits in self.edits if not edits.apply(logits[i], positions[i], supposed.get(i, ()))]

    def draw(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        """Chooses one token per row."""
        p = self._parameters
        bits = self._no_bits if self._unrandom else random_bits(p.seeds, p.choices, np.asarray(positions, np.int64))
        return self._form.draw(logits, bits)
