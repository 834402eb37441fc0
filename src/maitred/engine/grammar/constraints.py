"""Grammar states of the constrained sequences, and the masks of a step.

A sequence's grammar state depends only on its grammar and its output. After a preemption or a move from another
replica, the output is read again, so the masks stay the same.

The masks of a step depend only on earlier tokens. So a separate thread computes them without the GIL while the model
computes the logits.

Where the grammar allows only one continuation, its tokens are appended without sampling. These are the tokens into
which the tokenizer splits the forced text, without an end that another token could also begin with (llguidance's
*fast-forward tokens*). For a request with log-probabilities every token is sampled, because forced tokens have no
computed log-probability; and for one that bans tokens, because forced tokens may be among them.

The grammar also controls end tokens: the model's end-of-sequence token and the request's stop tokens are allowed where
the output is complete. Before `min_tokens`, and for the end-of-sequence token under `ignore_eos`, they are allowed only
where no other token is allowed. When the output is complete and has no possible continuation, the answer ends in any
case.

Copies of the grammar state follow draft tokens (`SpeculativeGrammarState`). If a draft is accepted, its copy becomes
the sequence's state, so no token is read twice.
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
    """Grammar states of the running constrained sequences.

    Args:
        compiler: Compiler that holds their grammars.
        vocab_size: Number of columns of the logits.
        eos_token_ids: End-of-sequence tokens of the model.

    Attributes:
        compiler: Compiler that holds their grammars.
        forced_tokens: Number of tokens that were appended without sampling; each saved its sequence a step.
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
        """Adds a sequence when it starts or resumes; a sequence without a grammar is ignored.

        Args:
            key: Key of the sequence in the other methods.
            sampling: Sampling parameters of its request, whose grammar is ready.
            output: Output tokens so far.
        """
        if sampling.grammar is not None:
            self._states_of[key] = GrammarState(self.compiler.matcher(sampling.grammar), sampling, self._eos, output)

    def remove(self, key: int) -> None:
        """Forgets a sequence; an unknown key is ignored."""
        self._states_of.pop(key, None)
        self._supposed.pop(key, None)
        self._faults.pop(key, None)

    def start(self, keys: Sequence[int], positions: Sequence[int]) -> "Future[RowMasks] | None":
        """Starts computing the masks of a step; returns None if no row is constrained.

        Args:
            keys: Sequence key of each row. Rows of one sequence are adjacent: the first is for its next token, and the
                others are for the tokens behind its latest draft, in order.
            positions: Number of output tokens of each row so far, draft tokens included.
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
        """Starts to check a new draft of a sequence against its grammar; replaces the previous draft."""
        supposition = self._supposed[key] = (
            SpeculativeGrammarState(self._states_of[key]) if key in self._states_of else SpeculativeGrammarState()
        )
        return supposition

    def masks_behind(
        self, suppositions: Sequence[SpeculativeGrammarState], positions: Sequence[int]
    ) -> RowMasks | None:
        """Computes the masks of rows behind drafts; returns None if no row is constrained.

        Args:
            suppositions: Draft state of each row.
            positions: Number of output tokens of each row's sequence, draft tokens included.
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
        """Returns the forced tokens before the first sampling of a sequence since `add`."""
        word = self._states_of.get(key)
        forced = [] if word is None else word.forced_tokens()
        self.forced_tokens += max(0, len(forced) - 1)  # this step could have sampled one of them anyway
        return forced

    def advance(self, key: int, token: int) -> list[int]:
        """Records a sampled token; returns the forced tokens behind it, which are also recorded."""
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
            self.fail(key, f"The answer cannot be held to the grammar any longer: {fault}")
            return []
        forced = word.forced_tokens()
        self.forced_tokens += len(forced)
        return forced

    def fail(self, key: int, reason: str) -> None:
        """Records that a sequence cannot continue, because its latest token is invalid."""
        self._faults[key] = reason

    @property
    def faults(self) -> Mapping[int, str]:
        """Sequences that cannot continue -> reason, such as a grammar that has become too expensive."""
        return self._faults

    def _masks(self, rows: list[int], words: list[GrammarState], positions: list[int]) -> RowMasks:
        bits = np.empty((len(rows), self._states), np.int32)
        if self._executor is None:
            self._executor = LLExecutor(_MASK_THREADS)
        matchers = [(word.matcher, row) for row, word in enumerate(words)]
        self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.strides[0], len(rows))
        for own, word, position in zip(bits, words, positions, strict=True):
            if word.matcher.is_error():
                own[:] = -1  # the sampled token is discarded: see `advance`
            else:
                word.settle(own, position)
        return RowMasks(rows, bits)
