"""One answer in the making: its tokens, how far they are computed, and when it ends."""

from maitred.core.request import FinishReason, Request, SamplingParams
from maitred.engine.kv.table import BlockTable


class Sequence:
    """One choice of a request, as the scheduler tracks it.

    Every token but the newest is *computed*: its KV is in the sequence's blocks. Prefill, decode and recomputation
    after a preemption are one and the same operation, namely computing what is `pending`; a decode is the case of one
    pending token.

    Args:
        key: Unique in the engine, rising with arrival.
        request: What the sequence answers.
        index: Which of the request's choices.
        table: Its KV blocks; empty until admission.
        eos_token_ids: The tokens with which the model ends its turn.
    """

    __slots__ = (
        "cached_tokens",
        "computed",
        "index",
        "key",
        "once_computed",
        "preemptions",
        "prompt_tokens",
        "request",
        "stop_tokens",
        "table",
        "tokens",
    )

    def __init__(
        self, key: int, request: Request, index: int, table: BlockTable, eos_token_ids: frozenset[int]
    ) -> None:
        self.key = key
        self.request = request
        self.index = index
        self.table = table
        self.tokens = request.prompt
        """Prompt and output. The prompt's own list, which all choices share, until there is output."""
        self.prompt_tokens = len(request.prompt)
        self.computed = 0
        self.cached_tokens: int | None = None
        """Found in the prefix cache at first admission; None before."""
        self.once_computed = 0
        """The furthest that `computed` ever was; computing below it again is the cost of a preemption."""
        self.preemptions = 0
        own = frozenset(request.sampling.stop_token_ids)
        self.stop_tokens = own if request.sampling.ignore_eos else own | eos_token_ids

    @property
    def sampling(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.sampling

    @property
    def pending(self) -> int:
        """Tokens that are known but not computed; at least 1 while the sequence lives."""
        return len(self.tokens) - self.computed

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def expected_total(self) -> int:
        """Tokens, prompt and output, that it is expected to have in the end."""
        limit = self.sampling.max_tokens
        expected = self.request.expected_tokens
        output = limit if expected is None else min(limit, max(expected, self.output_tokens + 1))
        return self.prompt_tokens + output

    def append(self, token: int) -> FinishReason | None:
        """Adds the token that was sampled; tells whether it is the last one."""
        if self.output_tokens:
            self.tokens.append(token)
        else:
            self.tokens = [*self.tokens, token]
        if token in self.stop_tokens and self.output_tokens > self.sampling.min_tokens:
            return FinishReason.STOP
        if self.output_tokens >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        return None
