"""One answer in the making: its tokens, how far they are computed, and when it ends."""

from typing import TYPE_CHECKING

from maitred.core.flow import Flow
from maitred.core.request import EngineRequest, FinishReason, SamplingParams
from maitred.engine.kv.table import BlockTable
from maitred.fairness.fair_queue import QueueEntry

if TYPE_CHECKING:
    from maitred.engine.scheduler.wait_clock import ClockMark

MAX_PREEMPTIONS = 3
"""Per sequence. When it runs for the fourth time it has all the blocks that it can ever need, so that it neither is
preempted again nor makes others be."""


class Sequence:
    """One choice of a request, as the scheduler tracks it.

    The first tokens are *computed*: their KV is in the sequence's blocks. Prefill, decode and recomputation after a
    preemption are one and the same operation, namely computing what is `pending`; a decode is the case of one pending
    token, or a few more where an answer was extended by tokens that no step has computed.

    Args:
        key: Unique in the engine, rising with arrival.
        request: What the sequence answers.
        index: Which of the request's choices.
        table: Its KV blocks; empty until admission.
        eos_token_ids: The tokens with which the model ends its turn.
    """

    __slots__ = (
        "account",
        "arrival",
        "arrived_s",
        "cached_tokens",
        "computed",
        "deadline_s",
        "displaced",
        "entry",
        "excluded_at",
        "index",
        "itl_objective_s",
        "key",
        "max_tokens",
        "min_tokens",
        "once_computed",
        "plain_until",
        "preemptions",
        "promised_blocks",
        "prompt_tokens",
        "request",
        "stop_tokens",
        "table",
        "tokens",
        "waited_s",
    )

    # Set when the sequence joins the line: who is charged, since when it waits, and its place.
    account: "FlowCharge"
    arrival: "ClockMark"
    entry: QueueEntry["Sequence"]

    def __init__(
        self, key: int, request: EngineRequest, index: int, table: BlockTable, eos_token_ids: frozenset[int]
    ) -> None:
        sampling = request.sampling
        self.key = key
        self.request = request
        self.index = index
        self.table = table
        output = [] if request.resumes is None else request.resumes[index]
        self.tokens = [*request.prompt, *output] if output else request.prompt
        """Prompt and output. The prompt's own list, which all choices share, until there is output."""
        self.prompt_tokens = len(request.prompt)
        self.max_tokens = sampling.max_tokens
        # A grammar decides itself where a word may end, these wishes included.
        self.min_tokens = sampling.min_tokens if sampling.grammar is None else 0
        self.itl_objective_s = request.itl_objective_s
        self.arrived_s = 0.0
        self.deadline_s: float | None = None
        self.computed = 0
        self.cached_tokens: int | None = 0 if output else None
        """Of the prompt, found in the prefix cache instead of being computed; None before the first admission."""
        self.once_computed = len(self.tokens) - 1 if output else 0
        """The furthest that `computed` ever was when it stopped running, or within its prompt, here or where its answer
        was begun; computing below it again is the cost of a preemption, or of a replica that was lost."""
        self.plain_until = 0
        """Decodes at positions below need nothing but computing: no block is filled or missing, nothing is charged."""
        self.promised_blocks = 0
        """While it runs: blocks that it is expected to take yet."""
        self.preemptions = 0
        self.excluded_at = 0
        """When it last gave way to a guest; see `Guests`."""
        self.displaced = False
        """Whether it waits because others took its blocks."""
        self.waited_s: dict[str, float] = {}
        """By cause, up to its first token."""
        own = frozenset(sampling.stop_token_ids)
        self.stop_tokens = own if sampling.ignore_eos and sampling.grammar is None else own | eos_token_ids

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
    def admission_tokens(self) -> int:
        """Tokens for which it takes blocks when it is admitted."""
        if self.preemptions < MAX_PREEMPTIONS:
            return len(self.tokens)
        return self.prompt_tokens + self.max_tokens

    @property
    def expected_output(self) -> int:
        """Output tokens that it is expected to have in the end."""
        expected = self.request.expected_tokens
        return self.max_tokens if expected is None else min(self.max_tokens, max(expected, self.output_tokens + 1))

    def append(self, token: int) -> FinishReason | None:
        """Adds a token of the answer; tells whether it is the last one."""
        tokens = self.tokens
        output = len(tokens) - self.prompt_tokens
        if output:
            tokens.append(token)
        else:
            self.tokens = [*tokens, token]
        if token in self.stop_tokens and output >= self.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if output + 1 >= self.max_tokens else None


class FlowCharge:
    """One flow that has sequences here."""

    __slots__ = ("flow", "sequences")

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.sequences = 0
