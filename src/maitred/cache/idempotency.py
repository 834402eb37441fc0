"""Doing work once for a request that is sent several times: the words for it.

A client that lost its connection cannot know whether its request ran. With an ``Idempotency-Key`` it sends the request
again without fear: whoever comes first *claims* the key and does the work, and what the work says goes into a
*recording*; everybody else, the first one's own connection included, only reads the recording, from its beginning and
then live. So there is one kind of reader, a reader that is slow or leaves concerns nobody else, and all of them see the
same bytes.

A recording that ends well is kept for a while. One that fails is forgotten at once, because nothing was delivered or
billed as an answer: the next one with the key claims it anew.

`maitred.cache.memory` keeps recordings in this process. A store that several gateways share has to offer the same two
protocols.
"""

from types import TracebackType
from typing import NamedTuple, Protocol, Self


class IdempotencyKey(NamedTuple):
    """Key under which a request is a repeat of another: caller, route and the client's key."""

    caller: str
    """Tenant and key; nobody can name a recording of somebody else's."""
    route: str
    value: str
    """The ``Idempotency-Key``."""


class RecordedHead(NamedTuple):
    """How an answer begins."""

    status: int
    content_type: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    """Of this answer; what belongs to one request, such as its id, is not recorded."""
    streams: bool
    """Comes as events, piece by piece."""
    clamped_max_tokens: int | None = None
    """What ``max_tokens`` was lowered to, because a limit of the first caller had no room for more."""
    degraded: tuple[str, ...] = ()
    """What was taken from it because of the load."""


class RecordedResponseReader(Protocol):
    """One who reads a recording from its beginning. Leaving the block ends the reading.

    A Protocol, because a store that several gateways share has readers of its own.
    """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def head(self) -> RecordedHead:
        """Waits for the beginning.

        Raises:
            Exception: The work failed before that; this is its failure.
        """
        ...

    async def piece(self) -> bytes:
        """Returns the next bytes, at most some 64 KiB; empty at the end.

        Raises:
            Exception: The work failed; this is its failure, after everything that came before it.
            IdempotencyConflict: What comes next is not held any more, because this reader is far behind the others in
                an answer that is too large to keep.
        """
        ...

    def close(self) -> None:
        """Ends the reading of the response."""
        ...


class RecordedResponse(Protocol):
    """Recorded response to one key, so far. One writer, any number of readers.

    A Protocol, because a store that several gateways share has recordings of its own.
    """

    @property
    def request_id(self) -> str:
        """Id of the request that did the work."""
        ...

    @property
    def unwanted(self) -> bool:
        """Whether going on is pointless: the answer is too large to keep, and nobody reads it."""
        ...

    def reader(self) -> RecordedResponseReader:
        """Someone new who reads from the beginning."""
        ...

    async def begin(self, head: RecordedHead) -> None:
        """The answer begins; once."""
        ...

    async def add(self, data: bytes) -> None:
        """The answer goes on. Waits for readers only if it is too large to keep, and then for the fastest alone."""
        ...

    async def finish(self) -> None:
        """The answer is whole."""
        ...

    async def fail(self, error: Exception) -> None:
        """There is no whole answer, and none to keep. Readers get `error` after what was said so far."""
        ...


class IdempotencyClaim(NamedTuple):
    """Claim of a request on its key: the recording, and whether the request has to write it."""

    recording: RecordedResponse
    fresh: bool
    """The work is its own to do, and to record; exactly one of `finish` and `fail` must follow. Else: only read."""


class AnswerStore(Protocol):
    """Store of recorded responses."""

    async def claim(self, key: IdempotencyKey, body_hash: bytes, request_id: str) -> IdempotencyClaim:
        """Takes the key for a new recording, or finds the one that it has.

        Raises:
            IdempotencyConflict: The key's recording is of another body, or of an answer that was not kept.
        """
        ...
