"""Where each constrained sequence stands in its grammar.

A sequence's place follows from its grammar and its output, and from nothing else: one that comes back after a
preemption, or comes from another replica, has its output read again, and goes on with the same masks.

The masks of a step depend on tokens that are known before it, so they are computed in a thread of their own while the
model computes the logits, without the interpreter's lock.

Where the grammar leaves one continuation, its tokens are taken without being sampled: those into which the model's
tokenizer cuts the text that must come, less what another token could still begin with (llguidance's *fast-forward
tokens*). A request for log-probabilities has every token sampled, as nobody has computed them otherwise.

What may end an answer is a token, too: the model's end of turn, and the request's own stop tokens, may come where the
word is complete; before `min_tokens`, and the end of turn under `ignore_eos`, only where nothing else may. When a word
is complete and cannot go on, its answer ends whatever the request says: there is no token that could follow.

What would follow a guess is found on copies (`supposition`). Where the guess was right the copy is the sequence's
place, so no token is read twice.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor

from maitred.core.request import SamplingParams
from maitred.engine.grammar.compiler import GrammarCompiler
from maitred.engine.grammar.masks import WORD_BITS, RowMasks
from maitred.engine.grammar.state import GrammarState, SpeculativeGrammarState

_MASK_THREADS = 2


class Constraints:
    """The constrained sequences that run.

    Args:
        compiler: Has their grammars.
        vocab_size: Columns of the logits.
        eos_token_ids: How the model ends its turn.

    Attributes:
        compiler: Has their grammars.
        forced_tokens: Tokens that came without being sampled; each has saved its sequence a step.
    """

    def __init__(self, compiler: GrammarCompiler, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.compiler = compiler
        self._states = -(-vocab_size // WORD_BITS)
        self._eos = eos_token_ids
        self._states_of: dict[int, GrammarState] = {}
        self._supposed: dict[int, SpeculativeGrammarState] = {}
        self._faults: dict[int, str] = {}
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._executor: LLExecutor | None = None
        self.forced_tokens = 0

    def __contains__(self, key: int) -> bool:
        return key in self._states_of

    def add(self, key: int, sampling: SamplingParams, output: Sequence[int]) -> None:
        """Takes a sequence in, when it starts or resumes; one without a grammar is left alone.

        Args:
            key: How the other methods will call it.
            sampling: How its request is sampled; its grammar is ready.
            output: What it has generated so far.
        """
        if sampling.grammar is not None:
            self._states_of[key] = GrammarState(self.compiler.matcher(sampling.grammar), sampling, self._eos, output)

    def remove(self, key: int) -> None:
        """Forgets a sequence; an unknown key is ignored."""
        self._states_of.pop(key, None)
        self._supposed.pop(key, None)
        self._faults.pop(key, None)

    def start(self, keys: Sequence[int], positions: Sequence[int]) -> "Future[RowMasks] | None":
        """Begins to compute the masks of a step; None: none of its rows is constrained.

        Args:
            keys: The sequences that the rows belong to. Several rows of one stand together: the first one is for its
                next token, those behind it for what follows its latest supposition, choice by choice.
            positions: Output tokens that each has so far, supposed ones included.
        """
        if not self._states_of:
            return None
        rows = [row for row, key in enumerate(keys) if key in self._states_of]
        if not rows:
            return None
        words, ahead = [], 0
        for row in rows:
            key = keys[row]
            ahead = ahead + 1 if row and keys[row - 1] == key else 0
            words.append(self._supposed[key].words[ahead] if ahead else self._states_of[key])
        return self._beside.submit(self._masks, rows, words, [positions[row] for row in rows])

    def suppose(self, key: int) -> SpeculativeGrammarState:
        """Begins to follow the draft of a sequence by its grammar, and replaces what was followed before."""
        supposition = self._supposed[key] = (
            SpeculativeGrammarState(self._states_of[key]) if key in self._states_of else SpeculativeGrammarState()
        )
        return supposition

    def masks_behind(
        self, suppositions: Sequence[SpeculativeGrammarState], positions: Sequence[int]
    ) -> RowMasks | None:
        """The masks of rows that follow suppositions; None: none of them is constrained.

        Args:
            suppositions: One per row.
            positions: Output tokens that each row's sequence would have.
        """
        rows = [row for row, supposition in enumerate(suppositions) if supposition.words]
        if not rows:
            return None
        words = [suppositions[row].words[-1] for row in rows]
        return self._beside.submit(self._masks, rows, words, [positions[row] for row in rows]).result()

    @property
    def active(self) -> bool:
        """Whether any sequence is constrained."""
        return bool(self._states_of)

    def opening(self, key: int) -> list[int]:
        """The tokens that must come next, before the sequence is sampled for the first time since `add`."""
        word = self._states_of.get(key)
        forced = [] if word is None else word.forced_tokens()
        self.forced_tokens += max(0, len(forced) - 1)  # one could have been sampled in the step at hand
        return forced

    def advance(self, key: int, token: int) -> list[int]:
        """Takes note of a token that was sampled; returns those that must follow it, which are noted, too."""
        word = self._states_of.get(key)
        if word is None:
            return []
        supposed = self._supposed.get(key)
        known = None if supposed is None else supposed.after(word, token)
        if known is not None:
            self._states_of[key], forced = known
            self.forced_tokens += len(forced)
            return forced
        self._supposed.pop(key, None)
        fault = word.take(token)
        if fault is not None:
            self._faults[key] = fault
            return []
        forced = word.forced_tokens()
        self.forced_tokens += len(forced)
        return forced

    @property
    def faults(self) -> Mapping[int, str]:
        """The sequences that cannot go on, because their grammar has become too costly, and why."""
        return self._faults

    def _masks(self, rows: list[int], words: list[GrammarState], positions: list[int]) -> RowMasks:
        bits = np.empty((len(rows), self._states), np.int32)
        if self._executor is None:
            self._executor = LLExecutor(_MASK_THREADS)
        matchers = [(word.matcher, row) for row, word in enumerate(words)]
        self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.strides[0], len(rows))
        for own, word, position in zip(bits, words, positions, strict=True):
            if word.matcher.is_error():
                own[:] = -1  # what is sampled does not count: see `advance`
            else:
                word.settle(own, position)
        return RowMasks(rows, bits)
