"""Protocols of the replicas for the gateway, and the admin state of a replica.

A replica turns an `EngineRequest` into a stream of deltas; our engine behind a socket is one. External servers take and
return text; their interface is `maitred.core.text_replica.TextReplica`. The gateway knows replicas only through these
Protocols.

An operator puts a replica into one of three states: serving, draining, maintenance.

::

    serving --drain--> draining --nothing runs any more--> maintenance --serve--> serving
       |  ^               |                                           ^
       |  `-----serve-----'                                           |
       `--------------------------maintain----------------------------'   (from draining, too)

A draining replica takes no new requests and finishes the running ones. A replica in maintenance gets no requests,
whatever it reports, and its behaviour is not recorded.
"""

import hashlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from maitred.core.request import EngineRequest, ModelFingerprint, TokenDelta


class AdminStatus(StrEnum):
    """Status that an operator gives a replica."""

    SERVING = "serving"
    DRAINING = "draining"
    MAINTENANCE = "maintenance"


class AdminState:
    """Admin state and running attempts of a replica.

    Attributes:
        state: Admin status; see the module docstring.
        running: Number of running attempts.
        serving_since_s: Time since which it serves again; minus infinity if it never stopped.
        on_idle: Called when the last attempt has ended while the replica takes no new ones.
    """

    def __init__(self) -> None:
        self.state = AdminStatus.SERVING
        self.running = 0
        self.serving_since_s = float("-inf")
        self.on_idle: Callable[[], None] = lambda: None

    @property
    def serving(self) -> bool:
        """Whether the replica takes new requests."""
        return self.state is AdminStatus.SERVING

    def drain(self) -> None:
        """Stops new requests to the replica. In maintenance the call changes nothing."""
        if self.state is AdminStatus.SERVING:
            self.state = AdminStatus.DRAINING if self.running else AdminStatus.MAINTENANCE

    def maintain(self) -> None:
        """Puts the replica into maintenance; its owner must end the running attempts."""
        self.state = AdminStatus.MAINTENANCE

    def serve(self, now_s: float) -> None:
        """Lets the replica take requests again. A serving replica is unchanged."""
        if self.state is not AdminStatus.SERVING:
            self.state = AdminStatus.SERVING
            self.serving_since_s = now_s

    def on_begin(self) -> None:
        """Notes that an attempt runs at the replica."""
        self.running += 1

    def on_end(self) -> None:
        """Notes that an attempt has ended."""
        self.running -= 1
        if not self.running and self.state is not AdminStatus.SERVING:
            self.state = AdminStatus.MAINTENANCE
            self.on_idle()


class ModelCard(msgspec.Struct, frozen=True):
    """Card of the model that a replica runs, as reported by the replica."""

    name: str
    context_tokens: int
    """Length of the context window in tokens, prompt and answer together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_sequences: int
    """Maximum number of sequences in one batch."""
    kv_capacity_tokens: int
    max_choices: int
    """Largest `n` the replica accepts."""
    dtype: str
    device: str
    embedding_dimensions: int = 0
    """Dimensions of its embedding vectors; 0: the model generates text."""
    pooling: str = ""
    """How the rows of a text become its vector; empty: the model generates text."""
    digest: ModelFingerprint = ModelFingerprint()
    """Fingerprint of the files that the model was loaded from."""
    feature_version: int = 0
    """Version of the features by which its verifiers judge pairs of questions; 0: it compares no questions."""
    region: str | None = None
    """Region of its process; None: it does not tell one."""

    @property
    def max_sequence_tokens(self) -> int:
        """Most tokens of a prompt and its answer: the smaller of context window and KV cache."""
        return min(self.context_tokens, self.kv_capacity_tokens)

    @property
    def encoder_version(self) -> str:
        """Version of an encoder's vectors; what was learnt from vectors of another version is of no use.

        It changes with the settings of the model, its tokenizer, its weights, its pooling and its type of numbers, and
        with the features of its verifiers, which an engine of another version may define in another way.
        """
        digest, weights = self.digest, self.digest.content or self.digest.weights
        parts = (digest.shape, digest.tokenizer, weights, self.pooling, self.dtype, self.feature_version)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """Measured step times of an engine as a linear model, accurate enough for predictions.

    A step has `t` tokens: `d` of them are decodes of sequences with `c` context tokens in total, and the others belong
    to `n` prefill chunks with `p` attention pairs (each token attends to itself and to every token before it). Of the
    prefill's tokens, `l` have log-probabilities computed behind them. The step takes ``fixed_s + token_s * t +
    context_token_s * c + decode_s * d + chunk_s * n + pair_s * p + scored_s * l``. All values are 0 before the first
    measurement.
    """

    fixed_s: float = 0.0
    token_s: float = 0.0
    context_token_s: float = 0.0
    decode_s: float = 0.0
    """Extra seconds of a decode token compared to a prefill token. A decode token shares the read of the weights with
    few other tokens, and it is sampled."""
    chunk_s: float = 0.0
    pair_s: float = 0.0
    scored_s: float = 0.0
    """Extra seconds of a prefill token behind which log-probabilities are computed: a row of the whole vocabulary."""

    def of(
        self,
        tokens: int,
        context_tokens: int,
        *,
        decodes: int = 0,
        chunks: int = 0,
        pairs: int = 0,
        scored: int = 0,
    ) -> float:
        """Returns the predicted seconds of a step."""
        return (
            self.fixed_s
            + self.token_s * tokens
            + self.context_token_s * context_tokens
            + self.decode_s * decodes
            + self.chunk_s * chunks
            + self.pair_s * pairs
            + self.scored_s * scored
        )

    def decoding(self, sequences: int, context_tokens: int) -> float:
        """Returns the predicted seconds of a step with only decodes."""
        return self.of(sequences, context_tokens, decodes=sequences)

    def chunk(self, start: int, length: int) -> float:
        """Returns the seconds that a prefill chunk of `length` tokens after `start` tokens adds."""
        return self.token_s * length + self.chunk_s + self.pair_s * pairs_of(start, length)

    def longest_chunk(self, seconds: float, start: int, at_most: int, *, scored: bool = False) -> int:
        """Returns the largest chunk in tokens, up to `at_most`, that fits into `seconds`.

        Args:
            seconds: Seconds of the chunk.
            start: Tokens before it.
            at_most: Largest result.
            scored: Whether log-probabilities are computed behind each of its tokens.
        """
        left_s = seconds - self.chunk_s
        if left_s < 0:
            return 0
        # pair_s / 2 * n^2 + linear * n <= left_s, solved in the form that does not divide by a pair_s of 0.
        linear = self.token_s + self.pair_s * (start + 0.5)
        if scored:
            linear += self.scored_s
        root = linear + math.sqrt(linear * linear + 2 * self.pair_s * left_s)
        return at_most if 2 * left_s >= at_most * root else int(2 * left_s / root)


def pairs_of(start: int, length: int) -> int:
    """Returns the attention pairs of `length` tokens after `start` earlier tokens."""
    return length * start + length * (length + 1) // 2


class GpuState(msgspec.Struct, frozen=True, array_like=True):
    """State of one accelerator of an engine, as its driver reports it for all processes."""

    name: str
    """Name of the accelerator, unique on its machine and stable across restarts."""
    busy_share: float
    """Busy share of the driver's last sampling period, from 0 to 1."""
    used_bytes: int
    total_bytes: int


class ProcessState(msgspec.Struct, frozen=True, array_like=True):
    """State of an engine's process on its machine; at most a second old while it reports."""

    cpu_s: float = 0.0
    """User and system CPU seconds since its start. This is a counter."""
    resident_bytes: int = 0
    open_files: int = 0
    threads: int = 0
    gpu: GpuState | None = None


class LoadReport(msgspec.Struct, frozen=True, array_like=True):
    """The state of an engine after a step; gauges first, then counters since its start."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    """Blocks that can be allocated now: never used, released, or cached and unreferenced."""
    total_blocks: int = 0
    steps: int = 0
    step_s: float = 0.0
    """Total seconds spent in steps."""
    prompt_tokens: int = 0
    """Prompt tokens of admitted sequences, cached ones included."""
    cached_tokens: int = 0
    """Prompt tokens of these that were found in the prefix cache."""
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Tokens recomputed after a preemption or after the loss of another replica; never billed."""
    finished: int = 0
    cancelled: int = 0
    wasted_tokens: int = 0
    """Wasted output tokens of sequences that were cancelled, or ended at a deadline without any use."""
    free_sequences: int = 0
    """Free sequence slots beyond the running and waiting sequences. All following fields are gauges."""
    promised_blocks: int = 0
    """KV blocks that running and waiting sequences are still expected to take."""
    waiting_prompt_tokens: int = 0
    """Prompt tokens of running and waiting sequences that are not computed yet."""
    paused: int = 0
    """Paused sequences whose readers lag; others may take their slots and blocks."""
    step_tokens: int = 0
    """Maximum number of tokens in the next step."""
    times: StepTimes = StepTimes()
    guests: int = 0
    """Running sequences beyond the regular slots, because their tenants held fewer slots than others."""
    guest_places: int = 0
    """Free slots for more such extra sequences."""
    forced_tokens: int = 0
    """Output tokens that a grammar forced without sampling: each saved its sequence a step. This is a counter."""
    drafted_tokens: int = 0
    """Guesses at tokens to come that steps have computed, since the engine's start..."""
    accepted_tokens: int = 0
    """...and those of them that were right: tokens of answers that needed no step of their own."""
    pinned_blocks: int = 0
    """KV blocks that are held by pins and therefore not free. This is a gauge."""
    pins_given_up: int = 0
    """Pins that were dropped early, because a request would have waited forever. This is a counter."""
    asleep: bool = False
    """Whether the engine sleeps: its weights and its KV cache are not in memory. This is a gauge."""
    wakes_in_s: float = 0.0
    """Predicted seconds to wake up."""
    swapped_blocks: int = 0
    """KV blocks of preempted sequences that were copied to the host's memory when others needed their room..."""
    restored_blocks: int = 0
    """...and those that were copied back instead of being computed again."""
    evicted_blocks: int = 0
    """Cached KV blocks that were evicted. This field and the next three are counters."""
    batched: int = 0
    """Sum of the batch sizes of all steps, in sequences."""
    prefill_tokens: int = 0
    """Prefill tokens that steps have computed, recomputed tokens included."""
    decode_tokens: int = 0
    """Output tokens that steps have computed, rejected draft tokens included."""
    process: ProcessState = ProcessState()
    cached_blocks: int = 0
    """Free KV blocks that still hold a cached prefix for later requests. This is a gauge."""


class ExternalLoad(NamedTuple):
    """Load that a server reports for callers other than this gateway."""

    requests: float
    waiting: float
    """Requests of these that the server has not started."""
    late_s: float
    """Seconds since the next report was due; infinite if there was no report."""


class TokenStream(Protocol):
    """Token stream of the answer to one request.

    Attributes:
        on_unread: Called with the number of tokens that came while no reader waited for them.
    """

    on_unread: Callable[[int], None] | None

    def __aiter__(self) -> AsyncIterator[list[TokenDelta]]:
        """Yields batches of deltas; ends after every choice has finished.

        A slow reader gets all accumulated deltas in one batch.

        Raises:
            ReplicaLost: The replica died; the answer so far is incomplete.
        """
        ...

    def listen(self, hear: Callable[[Sequence[TokenDelta]], bool]) -> None:
        """Passes each batch to `hear` while the reader waits; if `hear` returns True, it waits on.

        An exception from `hear` is raised in the reader.
        """
        ...

    def cancel(self, index: int) -> None:
        """Ends one choice; the engine frees its resources by the next step. No delta follows."""
        ...

    def pause(self) -> None:
        """Pauses every choice until `resume`; no output is lost, but other sequences may go first."""
        ...

    def resume(self) -> None:
        """Resumes a paused stream."""
        ...


class HasModelCard(Protocol):
    """Owner of a model card: one replica, or all replicas of a model."""

    def card(self) -> ModelCard:
        """Returns the card of the model that runs there.

        Raises:
            ReplicaUnavailable: No replica is ready.
        """
        ...


class ReplicaBase(HasModelCard, Protocol):
    """Interface of every replica, of tokens or of text."""

    def load(self) -> LoadReport:
        """Returns the last load report of the replica."""
        ...

    def count_unreported(self) -> int:
        """Returns the number of submitted requests that the last report does not include yet."""
        ...

    @property
    def weight(self) -> float:
        """Share of the load, above 0 and up to 1: a replica that returns starts with a small share."""
        ...

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every report, and when the replica becomes ready or is lost. This cannot be undone."""
        ...


class Replica(ReplicaBase, Protocol):
    """A replica that serves requests of one model as tokens."""

    def generate(self, request: EngineRequest) -> AbstractAsyncContextManager[TokenStream]:
        """Submits the request; exit from the context cancels unfinished choices.

        Raises:
            ReplicaUnavailable: The replica is not ready; nothing was submitted.
        """
        ...
