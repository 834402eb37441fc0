"""Idempotency protocols: a request that is sent several times does its work only once.

A client that lost its connection cannot know whether its request was executed. With an ``Idempotency-Key`` the client
can safely send the request again: the first request with a key *claims* the key and does the work, and the output of
the work goes into a *recording*; all connections, including that of the first request, only read the recording, from
its beginning and then live. All readers therefore have the same code, a slow or disconnected reader does not affect the
others, and all of them get the same bytes.

A recording that ends without an error is kept for some time. A recording that fails is removed immediately, because no
answer was delivered or billed: the next request with the key claims it again.

`maitred.cache.memory` keeps recordings in this process. A store that several gateways share must implement the same two
protocols. Responses in the background are recorded there too, each under its own id: other gateways read what the
database has of them.
"""

from types import TracebackType
from typing import NamedTuple, Protocol, Self


class IdempotencyKey(NamedTuple):
    """Key that identifies repeated requests: caller, route and the key that the client sent."""

    caller: str
    """Tenant and API key of the caller, so that no caller can name the recording of another."""
    route: str
    value: str
    """Value of the ``Idempotency-Key`` header."""
    organisation: str = ""
    """Organisation of the caller, which shares the memory with others."""


class RecordedHead(NamedTuple):
    """Head of a recorded answer."""

    status: int
    content_type: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    """Headers of the recorded answer; headers of a single request, such as its id, are not recorded."""
    streams: bool
    """Whether the answer is an event stream."""
    clamped_max_tokens: int | None = None
    """Reduced value of ``max_tokens``, if a limit of the first caller did not allow more."""
    degraded: tuple[str, ...] = ()
    """Reductions of the request because of the load."""


class RecordedResponseReader(Protocol):
    """Reader of a recording, which begins at its start; leaving the block ends the reading.

    A Protocol, because a store that several gateways share has its own implementation.
    """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def head(self) -> RecordedHead:
        """Waits for the head of the recording.

        Raises:
            Exception: The work failed before the head; this is the error of the work.
        """
        ...

    async def piece(self) -> bytes:
        """Returns the next bytes, at most about 64 KiB; the result is empty at the end.

        Raises:
            Exception: The work failed; the error of the work comes after all recorded bytes.
            IdempotencyConflict: The next bytes are no longer stored, because this reader is far behind the others and
                the answer is too large to keep.
        """
        ...

    def close(self) -> None:
        """Ends the reading of the response."""
        ...


class RecordedResponse(Protocol):
    """Recorded response to one key, with one writer and any number of readers.

    A Protocol, because a store that several gateways share has its own implementation.
    """

    @property
    def request_id(self) -> str:
        """Id of the request that did the work."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the work has ended."""
        ...

    @property
    def unwanted(self) -> bool:
        """Whether the work can stop, because the answer is too large to keep and has no reader."""
        ...

    def reader(self) -> RecordedResponseReader:
        """Returns a new reader, which reads from the beginning."""
        ...

    async def begin(self, head: RecordedHead) -> None:
        """Records the head of the answer; called exactly once."""
        ...

    async def add(self, data: bytes) -> None:
        """Adds bytes to the answer.

        If the answer is too large to keep, this waits for the fastest reader; otherwise it does not wait for readers.
        """
        ...

    async def finish(self) -> None:
        """Marks the answer as complete."""
        ...

    async def fail(self, error: Exception) -> None:
        """Marks the answer as failed, and removes it.

        Readers get `error` after the bytes that were recorded so far.
        """
        ...


class IdempotencyClaim(NamedTuple):
    """Claim of a request for its key: the recording, and whether this request must write it."""

    recording: RecordedResponse
    fresh: bool
    """Whether this request must do the work and record it; if False, it only reads.

    If True, exactly one of `finish` and `fail` must follow.
    """


class AnswerStore(Protocol):
    """Store of recorded responses."""

    async def claim(self, key: IdempotencyKey, body_hash: bytes, request_id: str) -> IdempotencyClaim:
        """Claims the key for a new recording, or returns the existing recording of the key.

        Raises:
            IdempotencyConflict: The key has a recording of another request body, or of an answer that was not kept.
        """
        ...
