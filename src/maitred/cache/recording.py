"""Recording in memory, with one writer and any number of readers of different speeds.

An answer that exceeds the largest size, or the memory that can be freed, is *not kept*: from then on its recording
never stores more bytes than it did at that moment. Bytes that its readers have read are removed; the work waits for the
fastest reader, as it does for the client of an ordinary request; a reader that is behind the stored bytes gets an
error; and when there is no reader left, the work may stop. The key stays claimed, so that a repeated request is refused
and not generated again.
"""

import asyncio
from types import TracebackType
from typing import Protocol, Self

from maitred.cache.idempotency import IdempotencyKey, RecordedHead
from maitred.core.errors import IdempotencyConflict

ENTRY_BYTES = 1024
"""Bytes that a recording uses besides its answer, for its key and its objects."""
PIECE_BYTES = 64 * 1024
"""Largest piece for a reader; also the lead of the work over the fastest reader if not kept.


"""


class RecordingStore(Protocol):
    """Store that holds recordings and bounds their bytes.

    A Protocol, because the store itself depends on `MemoryRecording`.
    """

    def take(self, size: int) -> bool:
        """Reserves `size` more bytes, or returns False if there is no memory for them."""
        ...

    def count(self, size: int) -> None:
        """Adds `size` bytes to the count, or subtracts them if negative, without a check of the bound."""
        ...

    def store(self, recording: "MemoryRecording") -> None:
        """Keeps a recording that has ended; its age begins now."""
        ...

    def forget(self, recording: "MemoryRecording") -> None:
        """Frees the key of a recording; the recording itself exists while it has a reader."""
        ...


class MemoryRecording:
    """Recording in memory; implements `maitred.cache.idempotency.RecordedResponse`.

    Attributes:
        linked_keys: Further keys that lead to the recording.
        kept: Whether the whole answer is stored, so that it can be read from the beginning.
        ended: Whether the work has ended.
        failure: Error with which the work ended, or None.
        forgotten: Whether the store has removed the recording.
        readers: Current readers of the recording.
    """

    def __init__(
        self, shelf: RecordingStore, key: IdempotencyKey, body_hash: bytes, request_id: str, largest_bytes: int
    ) -> None:
        self.key = key
        self.linked_keys: list[IdempotencyKey] = []
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
        """Largest number of stored bytes after the recording is no longer kept."""
        self._changed = asyncio.Event()

    @property
    def size(self) -> int:
        """Number of bytes that the recording uses in the store."""
        return ENTRY_BYTES + len(self.data)

    @property
    def end(self) -> int:
        """Length of the answer so far."""
        return self.start + len(self.data)

    @property
    def unwanted(self) -> bool:
        """Whether the recording has no reader now and can get none later."""
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
        """Wakes all tasks that wait for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_change(self) -> None:
        """Waits until the recording has changed."""
        await self._changed.wait()

    def on_reader_moved(self) -> None:
        """Handles a reader that has advanced or has stopped reading."""
        if not self.kept:
            self._drop(0)
            self.notify()
        self.release()

    def release(self) -> None:
        """Releases the memory of the recording when it can get no more readers."""
        if self.forgotten and self.ended and not self.readers:
            self._shelf.count(-self.size)

    def _drop(self, before: int) -> None:
        """Removes the stored bytes before this position, or before the positions of all readers."""
        before = max(before, min((reader.position for reader in self.readers), default=self.end))
        gone = before - self.start
        if gone > 0:
            del self.data[:gone]
            self.start = before
            self._shelf.count(-gone)
            # A reader that is behind gets its error at its next read. The writer does not wait for this reader, because
            # the next read may come much later.
            self.readers = {reader for reader in self.readers if reader.position >= before}


class MemoryReader:
    """Reader of a memory recording; implements `maitred.cache.idempotency.RecordedResponseReader`."""

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
