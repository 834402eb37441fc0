"""Factory of sequences, which refuses requests that can never run here."""

from collections.abc import Mapping

from maitred.core.prefix import shared_scope
from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.kv.table import BlockTable
from maitred.engine.scheduler.kv_shares import KVShares
from maitred.engine.scheduler.sequence import Sequence


class SequenceFactory:
    """Factory of sequences from requests.

    Args:
        pool: The KV blocks.
        residency: Floors and ceilings of the tenants' blocks.
        block_tokens: Tokens per block.
        context_tokens: Maximum tokens of prompt and answer together.
        eos_token_ids: End-of-sequence tokens of the model.
        prefix_cache: Whether requests share prefixes. The choices of one request always do.
    """

    def __init__(
        self,
        pool: BlockPool,
        residency: KVShares,
        *,
        block_tokens: int,
        context_tokens: int,
        eos_token_ids: tuple[int, ...],
        prefix_cache: bool,
    ) -> None:
        if context_tokens > pool.total * block_tokens:
            raise ValueError("The KV pool must hold at least one sequence of context_tokens.")
        self._pool = pool
        self._residency = residency
        self._block_tokens = block_tokens
        self._context_tokens = context_tokens
        self._eos = frozenset(eos_token_ids)
        self._prefix_cache = prefix_cache
        self._next_key = 0

    def sequences(self, request: EngineRequest, now_s: float) -> list[Sequence]:
        """Makes one sequence for each choice to compute, with the arrival time `now_s`.

        Raises:
            ValueError: The request can never run here; the message says why.
        """
        self._check(request)
        scope = shared_scope(request.cache_scope) if self._prefix_cache else f"request:{self._next_key}"
        sequences = []
        for index in request.previous_outputs:
            table = BlockTable(self._pool, self._block_tokens, scope)
            sequence = Sequence(self._next_key, request, index, table, eos_token_ids=self._eos)
            sequence.arrived_s = now_s
            if request.deadline_in_s is not None:
                sequence.deadline_s = now_s + request.deadline_in_s
            self._next_key += 1
            sequences.append(sequence)
        return sequences

    def _check(self, request: EngineRequest) -> None:
        sampling = request.sampling
        if not request.prompt:
            raise ValueError("The prompt has no tokens.")
        if sampling.max_tokens < 0 or sampling.n < 1:
            raise ValueError("max_tokens must be at least 0, and n at least 1.")
        total = len(request.prompt) + sampling.max_tokens
        wish = f"The prompt's {len(request.prompt)} tokens and max_tokens {sampling.max_tokens} exceed"
        if total > self._context_tokens:
            raise ValueError(f"{wish} the context of {self._context_tokens} tokens.")
        most = self._residency.most(request.flow) * self._block_tokens
        if total > most:
            raise ValueError(f"{wish} the {most} tokens of the KV cache that the tenant may hold.")
        if request.resumes is not None:
            _check_resumed(request.resumes, sampling)


def _check_resumed(resumes: Mapping[int, list[int]], sampling: SamplingParams) -> None:
    if not resumes or not all(0 <= index < sampling.n for index in resumes):
        raise ValueError(f"What is resumed must be some of the choices 0 to {sampling.n - 1}.")
    if not all(len(output) < sampling.max_tokens for output in resumes.values()):
        raise ValueError(f"A choice with max_tokens {sampling.max_tokens} has ended and cannot be resumed.")
