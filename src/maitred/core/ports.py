"""Where parts that do not know each other meet: Protocols that one side implements and `maitred.app` wires.

A replica is anything that turns a `Request` into a stream of deltas: our engine behind a socket today, any
OpenAI-compatible server later. The gateway knows replicas only through these Protocols.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from maitred.core.request import Delta, Request


class ModelCard(msgspec.Struct, frozen=True):
    """What a replica says of the model it runs."""

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
    """Computed again after a preemption; never billed."""
    finished: int = 0
    cancelled: int = 0


class TokenStream(Protocol):
    """The answer to one request, as it comes."""

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        """Batches of deltas; ends after every choice has finished.

        A reader that lags gets what has piled up in one batch.

        Raises:
            ReplicaLost: The replica died; what was read so far is not the whole answer.
        """
        ...

    def cancel(self, index: int) -> None:
        """Ends one choice; the engine frees what it held by its next step. No delta of it follows."""
        ...


class Replica(Protocol):
    """One place where requests of one model can run."""

    def card(self) -> ModelCard:
        """What runs there.

        Raises:
            ReplicaUnavailable: The replica is not ready.
        """
        ...

    def load(self) -> LoadReport:
        """The last report heard from it."""
        ...

    def generate(self, request: Request) -> AbstractAsyncContextManager[TokenStream]:
        """Submits the request; leaving the context cancels whatever has not finished.

        Raises:
            ReplicaUnavailable: The replica is not ready; nothing was submitted.
        """
        ...
