"""Sequence: one choice of a request with its tokens, its computed length and its end conditions."""

from typing import TYPE_CHECKING

from maitred.core.flow import Flow
from maitred.core.request import EngineRequest, FinishReason, SamplingParams
from maitred.engine.kv.table import BlockTable
from maitred.fairness.fair_queue import QueueEntry

if TYPE_CHECKING:
    from maitred.engine.scheduler.wait_clock import ClockMark

MAX_PREEMPTIONS = 3
"""Maximum number of preemptions per sequence. When it is admitted for the fourth time, it gets all blocks that it can
ever need. So it is not preempted again and causes no preemption."""


class Sequence:
    """One choice of a request, as the scheduler tracks it.

    The first tokens are *computed*: their KV is in the sequence's blocks. Prefill, decode and recomputation after a
    preemption are the same operation: they compute the `pending` tokens. A decode has one pending token, or a few more
    where an answer was extended by uncomputed tokens.

    Args:
        key: Key that is unique in the engine and rises with arrival.
        request: Request that the sequence answers.
        index: Index of the request's choice.
        table: Its KV blocks; empty until admission.
        eos_token_ids: End-of-sequence tokens of the model.
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
        "scored",
        "stop_tokens",
        "table",
        "tokens",
        "turn",
        "waited_s",
    )

    # Set when the sequence joins the waiting queue: the charged account, the start of the wait, and the queue entry.
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
        """Tokens of prompt and output. Until there is output, this is the prompt's list, which all choices share."""
        self.prompt_tokens = len(request.prompt)
        self.max_tokens = sampling.max_tokens
        # With a grammar, the grammar state decides where an answer may end, and applies `min_tokens`.
        self.min_tokens = sampling.min_tokens if sampling.grammar is None else 0
        self.itl_objective_s = request.itl_objective_s
        self.arrived_s = 0.0
        self.deadline_s: float | None = None
        self.computed = 0
        self.cached_tokens: int | None = 0 if output else None
        """Prompt tokens that were found in the prefix cache; None before the first admission."""
        self.once_computed = len(self.tokens) - 1 if output else 0
        """Largest `computed` at a preemption, in the prompt, or at a lost replica; below it is recomputation."""
        self.plain_until = 0
        """Position below which decodes only compute: they fill or need no block, and charge nothing."""
        self.scored: int | None = None
        """Number of leading tokens behind which the next prompt token's log-probability is known; None: not wanted."""
        if sampling.prompt_logprobs is not None and index == min(request.previous_outputs):
            self.scored = 0
        self.promised_blocks = 0
        """Number of further blocks that a running sequence is expected to take."""
        self.preemptions = 0
        self.excluded_at = 0
        """Step in which it was last excluded for an overcommitted sequence; see `OvercommitSlots`."""
        self.displaced = False
        """Whether the sequence waits because it was preempted."""
        self.turn: int | None = None
        """Place among the waiting sequences of its client's request when it first waited; None: it has not waited."""
        self.waited_s: dict[str, float] = {}
        """Waiting seconds by cause, until the first token."""
        own = frozenset(sampling.stop_token_ids)
        self.stop_tokens = own if sampling.ignore_eos and sampling.grammar is None else own | eos_token_ids

    @property
    def sampling(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.sampling

    @property
    def pending(self) -> int:
        """Number of known tokens without computed KV; at least 1 until the sequence ends."""
        return len(self.tokens) - self.computed

    @property
    def reusable_tokens(self) -> int:
        """Number of leading tokens whose KV may come from the prefix cache instead of being computed.

        At least one token is computed, because its logits are needed. So is each one whose logits the log-probabilities
        of the prompt still need.
        """
        return self.scored if self.scored is not None and self.is_scoring else len(self.tokens) - 1

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of the prompt are wanted that are not computed."""
        return self.scored is not None and self.scored < self.prompt_tokens - 1

    @property
    def output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def admission_tokens(self) -> int:
        """Number of tokens for which the sequence takes blocks at its admission."""
        if self.preemptions < MAX_PREEMPTIONS:
            return len(self.tokens)
        return self.prompt_tokens + self.max_tokens

    @property
    def expected_output(self) -> int:
        """Expected number of output tokens at the end of the sequence."""
        expected = self.request.expected_tokens
        return self.max_tokens if expected is None else min(self.max_tokens, max(expected, self.output_tokens + 1))

    def append(self, token: int) -> FinishReason | None:
        """Appends an output token; returns the finish reason if it is the last one."""
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
    """Account of one flow that has sequences in this engine."""

    __slots__ = ("flow", "sequences")

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.sequences = 0
