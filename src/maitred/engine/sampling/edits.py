"""Edits of single logits before sampling: penalties, bias, end tokens before `min_tokens`, and tokens that are banned.

A penalty changes only tokens that the row has seen: hundreds in a vocabulary of 150,000. So each row with edits keeps a
table of these tokens, with one more entry per new token. An edit changes as many logits as the table has entries. Rows
without edits have no table and cost nothing.

For a token with logit x, seen in prompt or output, and c times in the output::

    x ← x / repetition if x > 0 else x · repetition        (Keskar et al., "CTRL", arXiv:1909.05858)
    x ← x - frequency · c - presence · [c > 0]
    x ← x + bias
    x ← -inf                                                if it would end the answer before min_tokens
    x ← -inf                                                if it is not allowed, or would complete a bad word

A bad word is a sequence of tokens, which the output before it can have begun; its last token is banned then, as in vLLM
(``vllm/v1/sample/ops/bad_words.py``). Drafts count as output, so an answer with drafts has the tokens of one without.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maitred.core.request import SamplingParams
from maitred.engine.compiled import compiled

E = TypeVar("E", bound=np.generic)


class RowEdits:
    """Table of one row's tokens whose logits change, with the data of each token.

    Args:
        params: Sampling parameters of the row's request.
        prompt: Prompt tokens of the request.
        output: Output tokens so far, for example after a preemption.
        ending: Tokens that would end the answer.
        vocab_size: Size of the vocabulary; larger token ids have no logit and are ignored.
    """

    __slots__ = (
        "_allowed",
        "_bad_words",
        "_banned",
        "_bias",
        "_counts",
        "_ending",
        "_in_prompt",
        "_longest_begun",
        "_recent",
        "_size",
        "_slot_of",
        "_tokens",
        "_vocab_size",
        "params",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int],
        ending: frozenset[int],
        vocab_size: int,
    ) -> None:
        self.params = params
        self._vocab_size = vocab_size
        self._slot_of: dict[int, int] = {}
        self._size = 0
        self._tokens = np.empty(64, np.int64)
        self._in_prompt = np.zeros(64, np.bool_)
        self._counts = np.zeros(64, np.int32)
        self._bias = np.zeros(64, np.float32)
        self._ending = np.array(sorted(t for t in ending if 0 <= t < vocab_size), np.int64)
        self._allowed = _in_vocabulary(params.allowed_token_ids, vocab_size)
        """Only tokens that can be chosen; empty: all."""
        self._banned = _in_vocabulary((word[-1] for word in params.bad_words_token_ids if len(word) == 1), vocab_size)
        """Bad words of one token."""
        self._bad_words: dict[int, list[tuple[int, ...]]] = {}
        """Longer bad words by their last token but one."""
        for word in params.bad_words_token_ids:
            if len(word) > 1 and word[-1] < vocab_size:
                self._bad_words.setdefault(word[-2], []).append(word)
        self._longest_begun = max(map(len, params.bad_words_token_ids), default=1) - 1
        """Most output tokens with which a bad word may have begun."""
        self._recent: list[int] = []
        """The last so many output tokens."""
        for token, bias in params.logit_bias.items():
            if 0 <= token < vocab_size:
                slot = self._slot(token)  # called first, because growing replaces the array
                self._bias[slot] = bias
        if params.repetition_penalty != 1.0:
            for token in dict.fromkeys(prompt):
                if 0 <= token < vocab_size:
                    slot = self._slot(token)
                    self._in_prompt[slot] = True
        for token in output:
            self.record(token)

    @staticmethod
    def is_needed(params: SamplingParams) -> bool:
        """Returns whether a row with these parameters has any edit."""
        return bool(params.logit_bias) or params.min_tokens > 0 or _penalises(params) or params.restricts_tokens

    def record(self, token: int) -> None:
        """Records a token that was chosen."""
        self._count(token, 1)
        if self._longest_begun:
            self._recent = [*self._recent, token][-self._longest_begun :]

    def apply(self, row: Tensor, position: int, supposed: Sequence[int] = ()) -> bool:
        """Edits the row's logits in place.

        Args:
            row: The logits.
            position: Position in the output.
            supposed: Draft tokens that count as chosen for this row only, and are not recorded.

        Returns:
            Whether any token can be chosen. The model's logits are finite, so all tokens of a row can be banned only
            by the request.
        """
        for token in supposed:
            self._count(token, 1)
        if row.device.type == "cpu":
            self._apply_on_host(row.detach().numpy(), position)
        else:
            self._apply_on_device(row, position)
        for token in supposed:
            self._count(token, -1)
        if not self.params.restricts_tokens:
            return True
        self._restrict(row, supposed)
        return row.max().item() > -np.inf

    def _restrict(self, row: Tensor, supposed: Sequence[int]) -> None:
        """Sets the logits of tokens that cannot be chosen to -inf."""
        if self._allowed.size:
            allowed = torch.from_numpy(self._allowed).to(row.device)
            kept = row[allowed]
            row.fill_(-torch.inf)
            row[allowed] = kept
        banned = self._banned
        if self._bad_words:
            before = [*self._recent, *supposed][-self._longest_begun :]
            words = self._bad_words.get(before[-1], ()) if before else ()
            completed = [word[-1] for word in words if before[1 - len(word) :] == [*word[:-1]]]
            banned = np.concatenate((banned, np.array(completed, np.int64)))
        if banned.size:
            row[torch.from_numpy(banned).to(row.device)] = -torch.inf

    def _apply_on_host(self, row: NDArray[np.float32], position: int) -> None:
        p = self.params
        n = self._size
        if n:
            _edit_row(
                row,
                self._tokens[:n],
                self._in_prompt[:n],
                self._counts[:n],
                self._bias[:n],
                np.float32(p.repetition_penalty),
                np.float32(p.presence_penalty),
                np.float32(p.frequency_penalty),
            )
        if position < p.min_tokens:
            row[self._ending] = -np.inf

    def _apply_on_device(self, row: Tensor, position: int) -> None:
        p = self.params
        n = self._size
        if n:
            tokens, in_prompt, counts, bias = (
                torch.from_numpy(array[:n]).to(row.device, non_blocking=True)
                for array in (self._tokens, self._in_prompt, self._counts, self._bias)
            )
            x = row[tokens]
            repeated = torch.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty)
            x = torch.where(in_prompt | (counts > 0), repeated, x)
            x = x - counts * p.frequency_penalty
            x = x - (counts > 0) * p.presence_penalty
            row[tokens] = x + bias
        if position < p.min_tokens:
            row[torch.from_numpy(self._ending).to(row.device)] = -torch.inf

    def _count(self, token: int, times: int) -> None:
        if _penalises(self.params) and 0 <= token < self._vocab_size:
            slot = self._slot(token)  # called first, because growing replaces the array
            self._counts[slot] += times

    def _slot(self, token: int) -> int:
        slot = self._slot_of.get(token)
        if slot is None:
            slot = self._size
            if slot == self._tokens.size:
                self._tokens = _double(self._tokens)
                self._in_prompt = _double(self._in_prompt)
                self._counts = _double(self._counts)
                self._bias = _double(self._bias)
            self._tokens[slot] = token
            self._slot_of[token] = slot
            self._size += 1
        return slot


def _in_vocabulary(tokens: Iterable[int], vocab_size: int) -> NDArray[np.int64]:
    return np.array(sorted({token for token in tokens if 0 <= token < vocab_size}), np.int64)


def _double(array: NDArray[E]) -> NDArray[E]:
    return np.concatenate((array, np.zeros_like(array)))


def _penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


@compiled
def _edit_row(
    row: NDArray[np.float32],
    tokens: NDArray[np.int64],
    in_prompt: NDArray[np.bool_],
    counts: NDArray[np.int32],
    bias: NDArray[np.float32],
    repetition: np.float32,
    presence: np.float32,
    frequency: np.float32,
) -> None:
    for i in range(tokens.size):
        x = row[tokens[i]]
        if in_prompt[i] or counts[i] > 0:
            x = x / repetition if x > 0 else x * repetition
        x = x - np.float32(counts[i]) * frequency
        if counts[i] > 0:
            x = x - presence
        row[tokens[i]] = x + bias[i]
