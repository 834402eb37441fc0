"""Text replicas: their requests and batches, the counterpart of `core.replica.Replica`.

A text replica is an external server that takes a conversation and returns text. The server has the chat template and
the tokenizer, so it counts the tokens, and its reported usage is billed. Until it reports the usage, token counts are
estimates (`maitred.text.estimate`).
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from maitred.core.inference import NativeApi, NativeRequest, TextDelta
from maitred.core.replica import ReplicaBase
from maitred.core.request import Usage
from maitred.core.trace_context import TraceContext


class TextRequest(msgspec.Struct, frozen=True):
    """One admitted request for a text replica."""

    id: str
    fields: Mapping[str, Any]
    """Request fields in OpenAI's format, as the caller wrote them, without omitted fields."""
    choices: int
    """Number of choices of all prompts together; their indexes start at 0."""
    max_tokens: int | None = None
    """Maximum output tokens of each choice; None: as many as the replica has room for."""
    chat: bool = True
    """Whether the request is a conversation; otherwise it has texts to continue."""
    scored: bool = False
    """Whether maitred wants log-probabilities that the caller did not request, if the replica has them."""
    model: str | None = None
    """Name of the model at the replica; None: the configured name."""
    has_other_target: bool = False
    """Whether another replica or another model can be asked instead, so that waiting long for this one makes no
    sense."""
    native: NativeRequest | None = None
    """The request in the API of the client, for a replica that speaks it; None: chat completions."""
    left_out: tuple[str, ...] = ()
    """Fields of the client's API that `fields` does not have."""
    given: str = ""
    """Text of the only choice that the caller already has; the answer continues after it. Empty: a new answer."""
    trace: TraceContext | None = None
    """Trace context of the sending span, for the replica's own spans; None: no trace."""


class TextBatch(msgspec.Struct, frozen=True, gc=False):
    """Text that has come from an upstream since the last batch."""

    parts: list[TextDelta]
    usage: Usage | None = None
    """Usage that the replica has counted so far, if it reports it."""
    chunks: int = 0
    """Number of chunks of the upstream answer in this batch."""
    whole: bool = False
    """Whether this is known to be the last batch; False: not known yet."""


class TextStream(Protocol):
    """Text stream of the answer to one `TextRequest`."""

    @property
    def ignored_fields(self) -> Sequence[str]:
        """Fields of the request that the replica was not given, because the answer is the same without them."""
        ...

    @property
    def is_passthrough(self) -> bool:
        """Whether the replica was given the request as its client wrote it, in the API that both speak."""
        ...

    def listen(self, pour: Callable[[TextBatch], bool]) -> None:
        """Offers each batch to `pour` while the reader waits; the reader gets the batches it declines."""
        ...

    def __aiter__(self) -> AsyncIterator[TextBatch]:
        """Yields batches, starting with the first part of the answer; ends after the complete answer.

        Raises:
            ReplicaUnavailable: The replica took the request and sent no data in time.
            ReplicaLost: The answer ended early or violates its API. The text so far is incomplete.
        """
        ...


class TextReplica(ReplicaBase, Protocol):
    """A replica that serves requests of one model as text."""

    @property
    def name(self) -> str:
        """Name of the replica in the ledger and in logs."""
        ...

    @property
    def trace_attributes(self) -> Mapping[str, str | int]:
        """Attributes for traces: ``provider``, ``host``, ``port`` and the server's name for the ``model``."""
        ...

    @property
    def answer_identity(self) -> bytes:
        """Digest of everything here that its answers depend on: its address, its name for the model, its settings."""
        ...

    @property
    def native_api(self) -> NativeApi | None:
        """API in which it gets requests as their clients wrote them; None: it speaks chat completions only."""
        ...

    def is_refusing(self) -> bool:
        """Returns whether the replica has refused so many requests in a row that the next one begins elsewhere.

        The answer is False for one request in a while, which finds out. Only ask for a request that has somewhere else
        to begin.
        """
        ...

    async def count_tokens(self, request: NativeRequest, model: str | None) -> Mapping[str, Any] | None:
        """Returns what the replica says of the tokens of a prompt; None: it cannot be asked, or it does not answer.

        Args:
            request: The request in the API of its client.
            model: Name of the model at the replica; None: the configured name.

        Raises:
            InvalidRequest: The replica says that the request is at fault.
        """
        ...

    def generate(self, request: TextRequest) -> AbstractAsyncContextManager[TextStream]:
        """Returns a context that sends the request and yields its stream; its exit cancels unfinished work.

        Raises:
            InvalidRequest: The replica says that the request is at fault.
            ReplicaUnavailable: The replica refuses the request, now or always.
            ReplicaLost: The replica failed at once.
        """
        ...
