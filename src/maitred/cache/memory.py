"""Keeps recordings in the memory of this process, within a bound.

What counts against the bound is every recording that exists: one that is being written, one that is kept, and one that
has been let go of but that somebody still reads. When there is no room for more, those that ended first go first; those
that have readers stay, because dropping them would free nothing. When nothing can go, what is being written is not kept
(see `maitred.cache.recording`).

Everything is one event loop's; nothing here suspends between looking and acting.
"""

from collections import OrderedDict

from maitred.cache.config import IdempotencyConfig
from maitred.cache.idempotency import IdempotencyClaim, IdempotencyKey
from maitred.cache.recording import ENTRY_BYTES, MemoryRecording
from maitred.core.clock import Clock
from maitred.core.errors import IdempotencyConflict


class MemoryIdempotencyStore:
    """Keeps recordings in memory. Implements `cache.idempotency.AnswerStore`, and `RecordingStore` for recordings.

    Args:
        config: The bounds.
        clock: For the age of recordings.

    Attributes:
        held_bytes: What all recordings that exist take.
    """

    def __init__(self, config: IdempotencyConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._listed: dict[IdempotencyKey, MemoryRecording] = {}
        self._ended: OrderedDict[IdempotencyKey, float] = OrderedDict()
        """When each kept recording ended, in that order."""
        self.held_bytes = 0

    def reconfigure(self, config: IdempotencyConfig) -> None:
        """Keeps within these bounds from now on."""
        self._config = config

    def __len__(self) -> int:
        """Keys that are taken."""
        return len(self._listed)

    async def claim(self, key: IdempotencyKey, body_hash: bytes, request_id: str) -> IdempotencyClaim:
        """Claims a key for a new recording, or returns the one that has it; implements `AnswerStore.claim`."""
        self._expire()
        known = self._listed.get(key)
        if known is None:
            recording = MemoryRecording(self, key, body_hash, request_id, self._config.max_answer_bytes)
            self._listed[key] = recording
            self._evict(ENTRY_BYTES)
            self.held_bytes += ENTRY_BYTES
            return IdempotencyClaim(recording, fresh=True)
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
        return IdempotencyClaim(known, fresh=False)

    def take(self, size: int) -> bool:
        """Reserves bytes, and evicts ended recordings for them; implements `RecordingStore.take`."""
        self._evict(size)
        if self.held_bytes + size > self._config.max_bytes:
            return False
        self.held_bytes += size
        return True

    def count(self, size: int) -> None:
        """Counts bytes that are there already; implements `RecordingStore.count`."""
        self.held_bytes += size

    def store(self, recording: MemoryRecording) -> None:
        """Keeps a recording that has ended; implements `RecordingStore.store`."""
        self._ended[recording.key] = self._clock.monotonic_s()

    def forget(self, recording: MemoryRecording) -> None:
        """Frees the key of a recording; implements `RecordingStore.forget`."""
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

    def _evict(self, size: int) -> None:
        while self.held_bytes + size > self._config.max_bytes:
            unread = (self._listed[key] for key in self._ended if not self._listed[key].readers)
            oldest = next(unread, None)
            if oldest is None:
                return
            self.forget(oldest)
