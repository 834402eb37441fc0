"""Replicas as the gateway sees them: Protocols that one side implements and `maitred.app` wires, and their admin state.

A replica is anything that turns an `EngineRequest` into a stream of deltas: our engine behind a socket. Servers of
others, which take and give text, are `maitred.core.text_replica.TextReplica`. The gateway knows replicas only through
these Protocols.

An operator puts a replica into one of three states: serving, draining, maintenance.

::

    serving --drain--> draining --nothing runs any more--> maintenance --serve--> serving
       |  ^               |                                           ^
       |  `-----serve-----'                                           |
       `--------------------------maintain----------------------------'   (from draining, too)

Draining takes nothing new and finishes what runs. In maintenance nothing is sent, whatever the replica says of itself,
and nothing is learnt from how it behaves.
"""

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
    """The state, and what runs.

    Attributes:
        state: See the module.
        running: Attempts that have begun and not ended.
        serving_since_s: Since when it serves again; minus infinity if it has never ceased to.
    """

    def __init__(self) -> None:
        self.state = AdminStatus.SERVING
        self.running = 0
        self.serving_since_s = float("-inf")

    @property
    def serving(self) -> bool:
        """Whether it takes anything new."""
        return self.state is AdminStatus.SERVING

    def drain(self) -> None:
        """Takes nothing new. Changes nothing in maintenance."""
        if self.state is AdminStatus.SERVING:
            self.state = AdminStatus.DRAINING
            self._rest()

    def maintain(self) -> None:
        """Takes the replica away from now on; what runs there is its owner's to end."""
        self.state = AdminStatus.MAINTENANCE

    def serve(self, now_s: float) -> None:
        """Takes requests again. Whoever never had ceased to goes on as before."""
        if self.state is not AdminStatus.SERVING:
            self.state = AdminStatus.SERVING
            self.serving_since_s = now_s

    def on_begin(self) -> None:
        """Notes that an attempt runs at the replica."""
        self.running += 1

    def on_end(self) -> None:
        """Notes that an attempt has ended."""
        self.running -= 1
        self._rest()

    def _rest(self) -> None:
        if self.state is AdminStatus.DRAINING and not self.running:
            self.state = AdminStatus.MAINTENANCE


class ModelCard(msgspec.Struct, frozen=True):
    """Card of the model that a replica runs, as the replica gives it."""

    name: str
    context_tokens: int
    """Prompt and answer together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_sequences: int
    """Sequences in one batch at most."""
    kv_capacity_tokens: int
    max_choices: int
    """Largest `n` the replica accepts."""
    dtype: str
    device: str
    embedding_dimensions: int = 0
    """Numbers in the vector that it answers with; 0: it generates text."""
    digest: ModelFingerprint = ModelFingerprint()
    """Of the files it was read from."""


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """Step times that an engine has measured, as a linear model good enough to promise by.

    A step of `t` tokens, of which `d` decode sequences that have `c` tokens of context together, and the others are
    those of `n` prefill chunks and attend to `p` pairs (each to itself and to every token before it), takes
    ``fixed_s + token_s * t + context_token_s * c + decode_s * d + chunk_s * n + pair_s * p``.
    All 0 before anything was measured.
    """

    fixed_s: float = 0.0
    token_s: float = 0.0
    context_token_s: float = 0.0
    decode_s: float = 0.0
    """What a token that decodes costs beyond one of a prefill chunk: it shares its reading of the weights with few
    others, and it is sampled."""
    chunk_s: float = 0.0
    pair_s: float = 0.0

    def of(self, tokens: int, context_tokens: int, *, decodes: int = 0, chunks: int = 0, pairs: int = 0) -> float:
        """Seconds for such a step."""
        return (
            self.fixed_s
            + self.token_s * tokens
            + self.context_token_s * context_tokens
            + self.decode_s * decodes
            + self.chunk_s * chunks
            + self.pair_s * pairs
        )

    def decoding(self, sequences: int, context_tokens: int) -> float:
        """Seconds for a step of nothing but decodes."""
        return self.of(sequences, context_tokens, decodes=sequences)

    def chunk(self, start: int, length: int) -> float:
        """Seconds that a prefill chunk adds to a step: `length` tokens of one sequence, after `start` earlier ones."""
        return self.token_s * length + self.chunk_s + self.pair_s * pairs_of(start, length)

    def longest_chunk(self, seconds: float, start: int, at_most: int) -> int:
        """The most tokens, `at_most` of them, of which a `chunk` takes no longer than so many seconds."""
        left_s = seconds - self.chunk_s
        if left_s < 0:
            return 0
        # pair_s / 2 * n^2 + linear * n <= left_s, solved in the form that does not divide by a pair_s of 0.
        linear = self.token_s + self.pair_s * (start + 0.5)
        root = linear + math.sqrt(linear * linear + 2 * self.pair_s * left_s)
        return at_most if 2 * left_s >= at_most * root else int(2 * left_s / root)


def pairs_of(start: int, length: int) -> int:
    """Pairs of tokens that `length` tokens after `start` earlier ones attend to."""
    return length * start + length * (length + 1) // 2


class GpuState(msgspec.Struct, frozen=True, array_like=True):
    """One accelerator that an engine computes on, as its driver sees it: all processes there taken together."""

    name: str
    """Unique on its machine, and the same after a restart."""
    busy_share: float
    """Of the driver's last sampling period, from 0 to 1: the part in which anything ran."""
    used_bytes: int
    total_bytes: int


class ProcessState(msgspec.Struct, frozen=True, array_like=True):
    """State of an engine's process on its machine; at most a second old while it reports."""

    cpu_s: float = 0.0
    """User and system, since its start. A counter."""
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
    """Seconds spent in steps, in all."""
    prompt_tokens: int = 0
    """Prompt tokens of admitted sequences, cached ones included."""
    cached_tokens: int = 0
    """Of these, found in the prefix cache."""
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Computed again after a preemption, or after another replica that was lost; never billed."""
    finished: int = 0
    cancelled: int = 0
    wasted_tokens: int = 0
    """Output of sequences that were cancelled, or ended by their deadline with nobody to take a part."""
    free_sequences: int = 0
    """Sequences that the engine would take into its batch now, beside those it runs and those that wait in it. A gauge,
    as all that follow."""
    promised_blocks: int = 0
    """Blocks that what runs and waits is still expected to take."""
    waiting_prompt_tokens: int = 0
    """Prompt tokens of what runs and waits that are still to be computed."""
    paused: int = 0
    """Sequences whose readers have fallen behind; they are not computed, and others may have their slots and blocks."""
    step_tokens: int = 0
    """Tokens that the next step may compute at most."""
    times: StepTimes = StepTimes()
    guests: int = 0
    """Of those that run: how many do so beyond the places, because their tenants held fewer of them than others."""
    guest_places: int = 0
    """For further guests."""
    forced_tokens: int = 0
    """Output tokens that came without being sampled, because a grammar left no other: each has saved its sequence a
    step. A counter."""
    drafted_tokens: int = 0
    """Guesses at tokens to come that steps have computed, since the engine's start..."""
    accepted_tokens: int = 0
    """...and those of them that were right: tokens of answers that needed no step of their own."""
    pinned_blocks: int = 0
    """Blocks that pins hold, so that they are not free. A gauge."""
    pins_given_up: int = 0
    """Pins that went before their time, because a request would have waited for ever. A counter."""
    asleep: bool = False
    """Whether its weights and its KV cache are not in memory. A gauge."""
    wakes_in_s: float = 0.0
    """How long waking should take."""
    swapped_blocks: int = 0
    """KV blocks of preempted sequences that were copied to the host's memory when others needed their room..."""
    restored_blocks: int = 0
    """...and those that were copied back instead of being computed again."""
    evicted_blocks: int = 0
    """Blocks whose cached content gave way to something else. A counter, as the three that follow."""
    batched: int = 0
    """Sequences that steps have computed something of, each once for every step."""
    prefill_tokens: int = 0
    """Tokens that steps have computed of prompts, and of what was computed again."""
    decode_tokens: int = 0
    """Tokens that steps have computed of answers, wrong guesses included."""
    process: ProcessState = ProcessState()
    cached_blocks: int = 0
    """Of the free ones: those that hold a prefix which a later request may find. A gauge."""


class ExternalLoad(NamedTuple):
    """Load that a server reports for callers other than this gateway."""

    requests: float
    waiting: float
    """Of these, those that it has not begun."""
    late_s: float
    """For how long its next word has been due; infinite if there was none."""


class TokenStream(Protocol):
    """The answer to one request, as it comes."""

    def __aiter__(self) -> AsyncIterator[list[TokenDelta]]:
        """Batches of deltas; ends after every choice has finished.

        A reader that lags gets what has piled up in one batch.

        Raises:
            ReplicaLost: The replica died; what was read so far is not the whole answer.
        """
        ...

    def listen(self, hear: Callable[[Sequence[TokenDelta]], bool]) -> None:
        """Lets somebody hear each batch for which the reader waits; where that returns True, it goes on waiting.

        What it raises, the reader raises.
        """
        ...

    def cancel(self, index: int) -> None:
        """Ends one choice; the engine frees what it held by its next step. No delta of it follows."""
        ...

    def pause(self) -> None:
        """Stops the computation of every choice until `resume`; nothing is lost, but others may go before then."""
        ...

    def resume(self) -> None:
        """Resumes a paused stream."""
        ...


class HasModelCard(Protocol):
    """Owner of a model card: one replica, or all of a model."""

    def card(self) -> ModelCard:
        """Returns the card of the model that runs there.

        Raises:
            ReplicaUnavailable: Nothing is ready.
        """
        ...


class ReplicaBase(HasModelCard, Protocol):
    """Interface of every replica, of tokens or of text."""

    def load(self) -> LoadReport:
        """The last report heard from it."""
        ...

    def count_unreported(self) -> int:
        """Requests that were submitted and that the last report cannot know of yet."""
        ...

    @property
    def weight(self) -> float:
        """The part of its load that it should have, above 0 and up to 1: one that comes back begins with little."""
        ...

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every report, and when the replica becomes ready or is lost. For good."""
        ...


class Replica(ReplicaBase, Protocol):
    """One place where requests of one model can run."""

    def generate(self, request: EngineRequest) -> AbstractAsyncContextManager[TokenStream]:
        """Submits the request; leaving the context cancels whatever has not finished.

        Raises:
            ReplicaUnavailable: The replica is not ready; nothing was submitted.
        """
        ...
