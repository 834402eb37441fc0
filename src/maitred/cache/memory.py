"""Store of recordings in the memory of this process, with a size bound.

Every existing recording counts against the bound: recordings that are being written, kept recordings, and removed
recordings that still have a reader. If the bound is reached, the organisation with the most
kept bytes loses the recording that ended first; recordings with readers stay, because removing them would free no
memory. If no recording can be removed, the recording that is being written is not kept (see `maitred.cache.recording`).

The whole store belongs to one event loop; no method awaits between a check and the change that depends on it.
"""

from collections import Counter, OrderedDict

from maitred.cache.config import IdempotencyConfig
from maitred.cache.idempotency import IdempotencyClaim, IdempotencyKey, RecordedResponse
from maitred.cache.recording import ENTRY_BYTES, MemoryRecording
from maitred.core.clock import Clock
from maitred.core.errors import IdempotencyConflict


class MemoryIdempotencyStore:
    """Store of recordings in memory; implements `cache.idempotency.AnswerStore`.

    For its recordings it also implements `RecordingStore`.

    Args:
        config: Bounds on the time and the size of recordings.
        clock: Clock that measures the age of recordings.

    Attributes:
        held_bytes: Bytes of all existing recordings.
    """

    def __init__(self, config: IdempotencyConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._listed: dict[IdempotencyKey, MemoryRecording] = {}
        self._ended: OrderedDict[IdempotencyKey, float] = OrderedDict()
        """End time of each kept recording, in the order of the ends."""
        self._ended_of: dict[str, dict[IdempotencyKey, int]] = {}
        """Kept recordings of each organisation with their bytes, in the order of the ends."""
        self._ended_bytes: Counter[str] = Counter()
        self.held_bytes = 0

    def reconfigure(self, config: IdempotencyConfig) -> None:
        """Sets new bounds, which apply from now on."""
        self._config = config

    def __len__(self) -> int:
        """Returns the number of claimed keys."""
        return len(self._listed)

    async def claim(self, key: IdempotencyKey, body_hash: bytes, request_id: str) -> IdempotencyClaim:
        """Claims a key for a new recording, or returns its recording; implements `AnswerStore.claim`."""
        self._expire()
        known = self._listed.get(key)
        if known is None:
            recording = MemoryRecording(
                shelf=self,
                key=key,
                body_hash=body_hash,
                request_id=request_id,
                largest_bytes=self._config.max_answer_bytes,
            )
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

    def link(self, key: IdempotencyKey, recording: RecordedResponse) -> None:
        """Lets a second key lead to a recording, for as long as the recording is stored."""
        assert isinstance(recording, MemoryRecording), "it is one of this store's"
        self._listed[key] = recording
        recording.linked_keys.append(key)

    def find(self, key: IdempotencyKey) -> MemoryRecording | None:
        """Returns the recording of a key; None: there is none, or it is not kept from its beginning."""
        self._expire()
        known = self._listed.get(key)
        return known if known is not None and known.kept else None

    def discard(self, key: IdempotencyKey) -> None:
        """Removes the recording of a key that has ended, unless the key was only linked to it."""
        known = self._listed.get(key)
        if known is not None and known.ended and known.key == key:
            self.forget(known)

    def take(self, size: int) -> bool:
        """Reserves bytes, and evicts ended recordings for them; implements `RecordingStore.take`."""
        self._evict(size)
        if self.held_bytes + size > self._config.max_bytes:
            return False
        self.held_bytes += size
        return True

    def count(self, size: int) -> None:
        """Counts bytes that already exist; implements `RecordingStore.count`."""
        self.held_bytes += size

    def store(self, recording: MemoryRecording) -> None:
        """Keeps a recording that has ended; implements `RecordingStore.store`."""
        key = recording.key
        self._ended[key] = self._clock.monotonic_s()
        self._ended_of.setdefault(key.organisation, {})[key] = recording.size
        self._ended_bytes[key.organisation] += recording.size

    def forget(self, recording: MemoryRecording) -> None:
        """Frees the key of a recording; implements `RecordingStore.forget`."""
        key = recording.key
        for listed in (key, *recording.linked_keys):
            del self._listed[listed]
        if self._ended.pop(key, None) is not None:
            ended = self._ended_of[key.organisation]
            self._ended_bytes[key.organisation] -= ended.pop(key)
            if not ended:
                del self._ended_of[key.organisation], self._ended_bytes[key.organisation]
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
            unread = (
                self._listed[key]
                for organisation, _ in self._ended_bytes.most_common()
                for key in self._ended_of[organisation]
                if not self._listed[key].readers
            )
            oldest = next(unread, None)
            if oldest is None:
                return
            self.forget(oldest)
