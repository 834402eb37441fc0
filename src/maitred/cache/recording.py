"""One recording in memory: one writes, any number read, each at its own pace.

An answer that grows beyond the largest size, or beyond the room that can be made, is *not kept*: from then on its
recording never holds more than it did at that moment. What its readers have seen is dropped; the work waits for the
fastest of them, as it does for the client of an ordinary request; one who falls behind what is held is broken off; and
when nobody reads any more, the work may end. Its key stays taken, so that it is refused and not generated again.
"""

import asyncio
from types import TracebackType
from typing import Protocol, Self

from maitred.cache.idempotency import IdempotencyKey, RecordedHead
from maitred.core.errors import IdempotencyConflict

ENTRY_BYTES = 1024
"""What a recording costs beside its answer: its key, and the objects that it is made of."""
PIECE_BYTES = 64 * 1024
"""Given to a reader at once; and how far the work runs ahead of the fastest reader of an answer that is not kept."""


class RecordingStore(Protocol):
    """Store that holds recordings and bounds their bytes.

    A Protocol, because the store is made of recordings.
    """

    def take(self, size: int) -> bool:
        """Holds so many bytes more; False if there is no room for them."""
        ...

    def count(self, size: int) -> None:
        """Holds so many bytes more, or fewer, room or no room."""
        ...

    def store(self, recording: "MemoryRecording") -> None:
        """The recording has ended; its age begins."""
        ...

    def forget(self, recording: "MemoryRecording") -> None:
        """Frees the key of a recording, which lives on while somebody reads it."""
        ...


class MemoryRecording:
    """One recording. Implements `maitred.cache.idempotency.RecordedResponse`.

    Attributes:
        kept: Whether all of it is held, so that it can be read from the beginning.
        ended: Whether the work is over.
        failure: Why it did not end well.
        forgotten: Whether the shelf has let go of it.
        readers: Who reads.
    """

    def __init__(
        self, shelf: RecordingStore, key: IdempotencyKey, body_hash: bytes, request_id: str, largest_bytes: int
    ) -> None:
        self.key = key
        self.body_hash = body_hash
        self.request_id = request_id
        self.head: RecordedHead | None = None
        self.kept = True
        self.ended = False
        self.failure: Exception | None = None
        self.forgotten = False
        self.readers: set[MemoryReader] = set()
        self.start = 0
        """Of the answer, what is held begins here, ..."""
        self.data = bytearray()
        """...with these bytes."""
        self._shelf = shelf
        self._largest_bytes = largest_bytes
        self._most_bytes = 0
        """Once it is not kept: what it may hold."""
        self._changed = asyncio.Event()

    @property
    def size(self) -> int:
        """Bytes that the recording takes of the store."""
        return ENTRY_BYTES + len(self.data)

    @property
    def end(self) -> int:
        """Length of the answer so far."""
        return self.start + len(self.data)

    @property
    def unwanted(self) -> bool:
        """Whether nobody reads the recording and nobody will."""
        return not self.kept and not self.readers

    def reader(self) -> "MemoryReader":
        """Returns a new reader, which begins at the start."""
        reader = MemoryReader(self)
        self.readers.add(reader)
        return reader

    async def begin(self, head: RecordedHead) -> None:
        """Sets the head of the response, and wakes the readers."""
        self.head = head
        self.notify()

    async def add(self, data: bytes) -> None:
        """Adds bytes of the response, and wakes the readers."""
        if self.kept and len(self.data) + len(data) <= self._largest_bytes and self._shelf.take(len(data)):
            self.data += data
            self.notify()
            return
        self._shelf.count(len(data))
        self.data += data
        if self.kept:
            self.kept = False
            self._most_bytes = max(len(self.data), PIECE_BYTES)
        self.notify()
        while self.readers and self.end - max(reader.position for reader in self.readers) > PIECE_BYTES:
            await self.wait_change()
        self._drop(self.end - self._most_bytes)

    async def finish(self) -> None:
        """Ends the recording as complete, keeps it, and wakes the readers."""
        self.ended = True
        self._shelf.store(self)
        self.notify()

    async def fail(self, error: Exception) -> None:
        """Ends the recording as failed, and frees its key."""
        self.ended = True
        self.failure = error
        self._shelf.forget(self)
        self.notify()

    def notify(self) -> None:
        """Wakes everybody who waits for news."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_change(self) -> None:
        """Waits until anything has changed."""
        await self._changed.wait()

    def on_reader_moved(self) -> None:
        """A reader has gone on or left."""
        if not self.kept:
            self._drop(0)
            self.notify()
        self.release()

    def release(self) -> None:
        """Gives its room back, once nobody can come to it any more."""
        if self.forgotten and self.ended and not self.readers:
            self._shelf.count(-self.size)

    def _drop(self, before: int) -> None:
        """Lets go of what lies before this position, or before all readers."""
        before = max(before, min((reader.position for reader in self.readers), default=self.end))
        gone = before - self.start
        if gone > 0:
            del self.data[:gone]
            self.start = before
            self._shelf.count(-gone)
            # Who is broken off will find out at its next piece. Until then, which may be long, nobody waits for it.
            self.readers = {reader for reader in self.readers if reader.position >= before}


class MemoryReader:
    """One reader. Implements `maitred.cache.idempotency.RecordedResponseReader`."""

    def __init__(self, recording: MemoryRecording) -> None:
        self.position = 0
        self._recording = recording

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def head(self) -> RecordedHead:
        """Waits for the head of the response and returns it; implements `RecordedResponseReader.head`."""
        recording = self._recording
        while recording.head is None:
            if recording.failure is not None:
                raise recording.failure
            await recording.wait_change()
        return recording.head

    async def piece(self) -> bytes:
        """Waits for the next bytes and returns them; implements `RecordedResponseReader.piece`."""
        recording = self._recording
        while self.position == recording.end:
            if recording.failure is not None:
                raise recording.failure
            if recording.ended:
                return b""
            await recording.wait_change()
        offset = self.position - recording.start
        if offset < 0:
            raise IdempotencyConflict(
                "This answer became too large to keep, and this connection read it too slowly. Take a new "
                "Idempotency-Key to ask anew, and read faster, or send no key."
            )
        piece = bytes(recording.data[offset : offset + PIECE_BYTES])
        self.position += len(piece)
        recording.on_reader_moved()
        return piece

    def close(self) -> None:
        """Ends the reading; implements `RecordedResponseReader.close`."""
        if self in self._recording.readers:
            self._recording.readers.remove(self)
            self._recording.on_reader_moved()
