"""Recordings in the memory of this process, within a bound. Implements `maitred.cache.idempotency`.

What counts against the bound is every recording that exists: one that is being written, one that is kept, and one that
is not kept any more but that somebody still reads. When there is no room for more, those that ended first go first;
those that have readers stay, because dropping them would free nothing.

An answer that grows beyond the largest size, or beyond the room that is left when nothing can go, is *not kept*: from
then on it never holds more than it does at that moment. What its readers have seen is dropped; the work waits for the
fastest of them, as it does for the client of an ordinary request; one who falls behind what is held is broken off; and
when nobody reads any more, the work may end. Its key stays taken, so that it is refused and not generated again.

Everything is one event loop's; nothing here suspends between looking and acting.
"""

import asyncio
from collections import OrderedDict
from types import TracebackType
from typing import Self

from maitred.cache.config import IdempotencyConfig
from maitred.cache.idempotency import Claim, Head, RepeatKey
from maitred.core.clock import Clock
from maitred.core.errors import IdempotencyConflict

ENTRY_BYTES = 1024
"""What a recording costs beside its answer: its key, and the objects that it is made of."""
PIECE_BYTES = 64 * 1024
"""Given to a reader at once; and how far the work runs ahead of the fastest reader of an answer that is not kept."""


class MemoryAnswers:
    """Keeps recordings in memory.

    Args:
        config: The bounds.
        clock: For the age of recordings.

    Attributes:
        held_bytes: What all recordings that exist take.
    """

    def __init__(self, config: IdempotencyConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._listed: dict[RepeatKey, MemoryRecording] = {}
        self._ended: OrderedDict[RepeatKey, float] = OrderedDict()
        """When each kept recording ended, in that order."""
        self.held_bytes = 0

    def __len__(self) -> int:
        """Keys that are taken."""
        return len(self._listed)

    async def claim(self, key: RepeatKey, body_hash: bytes, request_id: str) -> Claim:
        """See `AnswerStore.claim`."""
        self._expire()
        known = self._listed.get(key)
        if known is None:
            recording = MemoryRecording(self, key, body_hash, request_id, self._config.max_answer_bytes)
            self._listed[key] = recording
            self._make_room(ENTRY_BYTES)
            self.held_bytes += ENTRY_BYTES
            return Claim(recording, fresh=True)
        if known.body_hash != body_hash:
            raise IdempotencyConflict(
                f"This Idempotency-Key was used with another body, by request {known.request_id}. Take a new key for "
                "each new request; repeat a request with its key and exactly its body."
            )
        if not known.kept:
            raise IdempotencyConflict(
                f"The answer to this Idempotency-Key, by request {known.request_id}, was too large to keep, so it "
                "cannot be sent again; nor is it generated again. Take a new key to ask anew."
            )
        return Claim(known, fresh=False)

    def take(self, size: int) -> bool:
        """Holds so many bytes more; False if there is no room for them."""
        self._make_room(size)
        if self.held_bytes + size > self._config.max_bytes:
            return False
        self.held_bytes += size
        return True

    def keep(self, recording: "MemoryRecording") -> None:
        """The recording has ended; its age begins."""
        self._ended[recording.key] = self._clock.monotonic_s()

    def forget(self, recording: "MemoryRecording") -> None:
        """The key is free again; the recording lives on while somebody reads it."""
        del self._listed[recording.key]
        self._ended.pop(recording.key, None)
        recording.forgotten = True
        recording.release()

    def _expire(self) -> None:
        oldest_s = self._clock.monotonic_s() - self._config.ttl_s
        while self._ended:
            key = next(iter(self._ended))
            if self._ended[key] > oldest_s:
                return
            self.forget(self._listed[key])

    def _make_room(self, size: int) -> None:
        while self.held_bytes + size > self._config.max_bytes:
            unread = (self._listed[key] for key in self._ended if not self._listed[key].readers)
            oldest = next(unread, None)
            if oldest is None:
                return
            self.forget(oldest)


class MemoryRecording:
    """One recording. Implements `maitred.cache.idempotency.Recording`.

    Attributes:
        kept: Whether all of it is held, so that it can be read from the beginning.
        ended: Whether the work is over.
        failure: Why it did not end well.
        forgotten: Whether the store has let go of it.
        readers: Who reads.
    """

    def __init__(
        self, store: MemoryAnswers, key: RepeatKey, body_hash: bytes, request_id: str, largest_bytes: int
    ) -> None:
        self.key = key
        self.body_hash = body_hash
        self.request_id = request_id
        self.head: Head | None = None
        self.kept = True
        self.ended = False
        self.failure: Exception | None = None
        self.forgotten = False
        self.readers: set[MemoryReader] = set()
        self.start = 0
        """Of the answer, what is held begins here, ..."""
        self.data = bytearray()
        """...with these bytes."""
        self._store = store
        self._largest_bytes = largest_bytes
        self._most_bytes = 0
        """Once it is not kept: what it may hold."""
        self._news = asyncio.Event()

    @property
    def size(self) -> int:
        """What it takes of the store's room."""
        return ENTRY_BYTES + len(self.data)

    @property
    def end(self) -> int:
        """Length of the answer so far."""
        return self.start + len(self.data)

    @property
    def unwanted(self) -> bool:
        """See `Recording.unwanted`."""
        return not self.kept and not self.readers

    def reader(self) -> "MemoryReader":
        """See `Recording.reader`."""
        reader = MemoryReader(self)
        self.readers.add(reader)
        return reader

    async def begin(self, head: Head) -> None:
        """See `Recording.begin`."""
        self.head = head
        self.tell()

    async def add(self, data: bytes) -> None:
        """See `Recording.add`."""
        if self.kept and len(self.data) + len(data) <= self._largest_bytes and self._store.take(len(data)):
            self.data += data
            self.tell()
            return
        self._store.held_bytes += len(data)
        self.data += data
        if self.kept:
            self.kept = False
            self._most_bytes = max(len(self.data), PIECE_BYTES)
        self.tell()
        while self.readers and self.end - max(reader.position for reader in self.readers) > PIECE_BYTES:
            await self.news()
        self._drop(self.end - self._most_bytes)

    async def finish(self) -> None:
        """See `Recording.finish`."""
        self.ended = True
        self._store.keep(self)
        self.tell()

    async def fail(self, error: Exception) -> None:
        """See `Recording.fail`."""
        self.ended = True
        self.failure = error
        self._store.forget(self)
        self.tell()

    def tell(self) -> None:
        """Wakes everybody who waits for news."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def news(self) -> None:
        """Waits until anything has changed."""
        await self._news.wait()

    def moved(self) -> None:
        """A reader has gone on or left."""
        if not self.kept:
            self._drop(0)
            self.tell()
        self.release()

    def release(self) -> None:
        """Gives its room back, once nobody can come to it any more."""
        if self.forgotten and self.ended and not self.readers:
            self._store.held_bytes -= self.size

    def _drop(self, before: int) -> None:
        """Lets go of what lies before this position, or before all readers."""
        before = max(before, min((reader.position for reader in self.readers), default=self.end))
        gone = before - self.start
        if gone > 0:
            del self.data[:gone]
            self.start = before
            self._store.held_bytes -= gone


class MemoryReader:
    """One reader. Implements `maitred.cache.idempotency.Reader`."""

    def __init__(self, recording: MemoryRecording) -> None:
        self.position = 0
        self._recording = recording

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def head(self) -> Head:
        """See `Reader.head`."""
        recording = self._recording
        while recording.head is None:
            if recording.failure is not None:
                raise recording.failure
            await recording.news()
        return recording.head

    async def piece(self) -> bytes:
        """See `Reader.piece`."""
        recording = self._recording
        while self.position == recording.end:
            if recording.failure is not None:
                raise recording.failure
            if recording.ended:
                return b""
            await recording.news()
        offset = self.position - recording.start
        if offset < 0:
            raise IdempotencyConflict(
                "This answer became too large to keep, and this connection read it too slowly. Take a new "
                "Idempotency-Key to ask anew, and read faster, or send no key."
            )
        piece = bytes(recording.data[offset : offset + PIECE_BYTES])
        self.position += len(piece)
        recording.moved()
        return piece

    def close(self) -> None:
        """See `Reader.close`."""
        if self in self._recording.readers:
            self._recording.readers.discard(self)
            self._recording.moved()
