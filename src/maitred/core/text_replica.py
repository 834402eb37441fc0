"""Replicas that speak text: their requests and batches, beside those of `core.replica.Replica`.

Such a replica is a server of somebody else's that takes a conversation and gives text. It has the chat template and
the tokenizer, so it counts the tokens, and what it says that it used is what is billed. Before it has said so, tokens
are estimates (`maitred.text.estimate`).
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from maitred.core.inference import TextDelta
from maitred.core.replica import ReplicaBase
from maitred.core.request import Usage
from maitred.core.trace_context import TraceContext


class TextRequest(msgspec.Struct, frozen=True):
    """One admitted request for a replica that speaks text."""

    id: str
    fields: Mapping[str, Any]
    """The request in the words of OpenAI's API, as its caller wrote it and without what the caller left out."""
    choices: int
    """Answers to all prompts together; their indexes count from 0."""
    max_tokens: int | None = None
    """Most output tokens of each choice; None: as many as the replica has room for."""
    chat: bool = True
    """Whether it is a conversation; else texts to continue."""
    scored: bool = False
    """Whether log-probabilities are welcome that its caller has not asked for, where the replica can tell them."""
    model: str | None = None
    """What the replica calls the model; None: as it is configured."""
    given: str = ""
    """Text of its only choice that its caller has already: the answer goes on behind it. Empty: it begins."""
    trace: TraceContext | None = None
    """Of the span on whose behalf it is sent, for the replica's own spans; None: nobody traces."""


class TextBatch(msgspec.Struct, frozen=True, gc=False):
    """Text that has come from an upstream since the last batch."""

    parts: list[TextDelta]
    usage: Usage | None = None
    """What the replica has counted up to now, if it says so."""
    chunks: int = 0
    """How many pieces of its answer have become these parts."""
    whole: bool = False
    """Whether it is known that nothing follows; False: that is not known yet."""


class TextStream(Protocol):
    """The answer to one `TextRequest`, as it comes."""

    def listen(self, pour: Callable[[TextBatch], bool]) -> None:
        """Offers `pour` what comes while somebody waits for it; what it does not take, who waits gets."""
        ...

    def __aiter__(self) -> AsyncIterator[TextBatch]:
        """Batches, of which the first has the first part of the answer; ends after the answer is whole.

        Raises:
            ReplicaUnavailable: It took the request and gave nothing in time.
            ReplicaLost: The answer broke off, or breaks the rules of its API. What was read so far is not all of it.
        """
        ...


class TextReplica(ReplicaBase, Protocol):
    """One place where requests of one model can run that takes and gives text."""

    @property
    def name(self) -> str:
        """Name of the replica in ledger and log."""
        ...

    @property
    def location(self) -> Mapping[str, str | int]:
        """Location for traces: ``provider``, ``host``, ``port`` and the server's name of the ``model``."""
        ...

    def send(self, request: TextRequest) -> AbstractAsyncContextManager[TextStream]:
        """Sends the request; leaving the context ends the work there, if it has not come to its end.

        Raises:
            InvalidRequest: The replica says that the request is at fault.
            ReplicaUnavailable: It does not take the request, now or at all.
            ReplicaLost: It failed at once.
        """
        ...
