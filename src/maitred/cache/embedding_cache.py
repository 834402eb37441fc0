"""Cache of vectors: each text has a key of its own, so a request computes only the texts that it is the first to bring.

Vectors are kept beside answers, within the same bound, and as the model has computed them: at their full length, from
which shorter ones are cut.
"""

import asyncio
import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

from maitred.cache.answer import add_seal, remove_seal
from maitred.cache.answer_cache import AnswerCache
from maitred.cache.answer_key import AnswerKey, answer_digest
from maitred.core.service import Vector

_FORMAT = b"v1"
"""Version of the encoded form; a vector of another version is not found."""
_STORED_S = struct.Struct("<d")
_TEXTS_AT_ONCE = 64
"""Texts that are looked up before other tasks may run: this takes about half a millisecond."""


class EmbeddingBackend(Protocol):
    """Store that keeps many small entries at once. Whatever fails in it is a miss, and never an error."""

    async def get_many(self, keys: Sequence[AnswerKey]) -> list[bytes | None]:
        """Returns what is kept under each key, in the order of the keys; None: nothing, or the store is away."""
        ...

    def put_many(
        self, entries: Sequence[tuple[AnswerKey, bytes]], ttl_s: float, since_s: float = math.inf
    ) -> asyncio.Task[None] | None:
        """Keeps all entries, for at most `ttl_s` seconds, in place of those with the same keys.

        Those that were removed at the monotonic time `since_s` or later are left out, as `AnswerBackend.put` does.

        Returns:
            The task at whose end they can be found; None: they are there now, or not kept.
        """
        ...


class PendingEmbedding(NamedTuple):
    """Vector that is being computed for one request, and for which others can wait."""

    rank: int
    """Rank of the priority class of the request."""
    is_over: asyncio.Future[None]


class EmbeddingCache:
    """Cache of vectors, one for each text.

    Args:
        answers: Cache of answers, whose settings hold for vectors, too.
        backend: Where vectors are kept.

    Attributes:
        answers: Cache of answers, whose settings hold for vectors, too.
        computing: Digest of a text -> its vector, which may be kept when it is computed.
    """

    def __init__(self, answers: AnswerCache, backend: EmbeddingBackend) -> None:
        self.answers = answers
        self.computing: dict[bytes, PendingEmbedding] = {}
        self._backend = backend

    async def find(
        self, keys: Sequence[AnswerKey], max_age_s: float | None = None
    ) -> list[tuple[Vector, float] | None]:
        """Returns the vector and its age in seconds for each key; None: it is not kept, or older than `max_age_s`."""
        found: list[tuple[Vector, float] | None] = []
        for begin in range(0, len(keys), _TEXTS_AT_ONCE):
            some = keys[begin : begin + _TEXTS_AT_ONCE]
            wall_s = self.answers.wall_s()
            for key, data in zip(some, await self._backend.get_many(some), strict=True):
                entry = None if data is None else _decode(data, key.seal, wall_s)
                found.append(None if entry is None or (max_age_s is not None and entry[1] > max_age_s) else entry)
            await asyncio.sleep(0)
        return found

    def store(
        self, vectors: Iterable[tuple[AnswerKey, Vector]], ttl_s: float, since_s: float = math.inf
    ) -> asyncio.Task[None] | None:
        """Keeps vectors, without letting their client wait.

        Returns:
            The task at whose end they can be found; None: they are there now, or not kept: they are too large, or such
            answers were removed at the monotonic time `since_s` or later.
        """
        stored_s = _STORED_S.pack(self.answers.wall_s())
        most = self.answers.config.max_answer_bytes
        entries = [(key, add_seal(_FORMAT, stored_s + vector, key.seal)) for key, vector in vectors]
        entries = [entry for entry in entries if len(entry[1]) <= most]
        return self._backend.put_many(entries, ttl_s, since_s) if entries else None


def text_digests(texts: Iterable[Sequence[int]], parts: Iterable[bytes | str]) -> list[bytes]:
    """Returns the digest of a key for each text.

    Args:
        texts: Token ids of each text.
        parts: What else decides its vector and who shares it: what computes it, the scope.
    """
    begun = blake2b(answer_digest(["text", *parts]), digest_size=32)
    digests = []
    for text in texts:
        digest = begun.copy()
        digest.update(array("I", text).tobytes())
        digests.append(digest.digest())
    return digests


def _decode(data: bytes, seal: bytes, wall_s: float) -> tuple[Vector, float] | None:
    """Returns a vector and its age; None: it is truncated, of another version, or was not stored under this key."""
    body = remove_seal(_FORMAT, data, seal)
    if body is None or len(body) < _STORED_S.size:
        return None
    (stored_s,) = _STORED_S.unpack_from(body)
    return body[_STORED_S.size :], max(0.0, wall_s - stored_s)
