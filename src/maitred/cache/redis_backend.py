"""Answers in a Redis that gateways share.

An answer is one key, which ends with its time. Before the answer, its value has a head: who has stored it, for which
model, until when and in which epoch. So what is kept can be counted and removed by these without another table, which
Redis could evict.

Whatever goes wrong is a miss. A look-up waits at most one timeout; after that nothing asks Redis until the late reply
has come. On a busy machine one reply of a hundred is late, so that the connection is not given up for it at once; after
a second it is. A connection that is lost is opened again beside the requests, after a pause.

Look-ups have a connection of their own, because answers that are stored can be long, and so have look-ups of many
vectors, which take as long as their replies keep coming.
"""

import asyncio
import hashlib
import logging
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

import msgspec

from maitred.cache.answer_key import AnswerKey
from maitred.cache.backend import AnswerSelection, CachedAnswers, RemovedAnswersLog, StoredAnswer
from maitred.cache.config import CacheConfig
from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid, StoreUnavailable
from maitred.redis.link import LinkLost, RedisLink, ReplyDelay, Word
from maitred.wire.admin.cache import CacheStoreBody

_log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
"""Time for which Redis is not asked after a failure..."""
PAUSE_S = 1.0
"""...and the longest such time: each attempt without a reply doubles it."""
_PATIENCE_S = 1.0
"""How long Redis may take where no request waits."""
_FINGERPRINT_TTL_S = 31 * 86_400
"""Longer than any answer is kept: an answer is not found without the fingerprint of its server."""
_LENGTH_BYTES = 2
_MAX_HEAD_BYTES = 1024
_MOST_PUTS = 256
"""Most answers that wait to be kept."""
_KEYS_PER_TURN = 256
"""About how many keys one round trip of a listing or a removal looks at."""


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """Head of a value: who has stored the answer, for which model, until when it is used, and in which epoch."""

    tenant: str
    model: str
    expires_s: float
    """Wall time of gateways after which it is not used, even if the clock of Redis was set back."""
    epoch: str = ""


class _Entry(NamedTuple):
    """Key of an answer with its head and its size."""

    key: bytes
    head: _Head | None
    """None: there is no answer behind this key."""
    size: int


_DECODER = msgspec.msgpack.Decoder(_Head)


class RedisBackend:
    """Answers in Redis. Implements `maitred.cache.backend.AnswerBackend` and `EmbeddingBackend`.

    The object is a context manager, which holds the connections while it is entered.

    Args:
        config: Settings; the `url` must be set.
        clock: Clock of this gateway.

    Raises:
        ConfigInvalid: The URL is missing, or it is not a Redis URL.
    """

    def __init__(self, config: CacheConfig, clock: Clock) -> None:
        if config.url is None:
            raise ConfigInvalid("cache.url is missing: say where Redis is, such as `redis://host:6379/0`.")
        try:
            # A link that waits for one timeout at most, also while Redis answers others.
            reads = RedisLink(
                config.url,
                timeout_s=config.answer_timeout_s,
                most_timeouts=1,
                connect_timeout_s=_PATIENCE_S,
                late_s=_PATIENCE_S,
            )
            batches = RedisLink(config.url, timeout_s=config.answer_timeout_s, connect_timeout_s=_PATIENCE_S)
            writes = RedisLink(config.url, timeout_s=_PATIENCE_S)
        except ValueError as error:
            raise ConfigInvalid(f"cache.url is not the URL of a Redis: {error}") from None
        self._reads = _BackgroundLink(reads, clock)
        self._batches = _BackgroundLink(batches, clock)
        self._writes = _BackgroundLink(writes, clock)
        self._clock = clock
        self._answers = f"{config.namespace}:answer:"
        self._fingerprints = f"{config.namespace}:fingerprint:"
        self._removals = RemovedAnswersLog()
        self._stores = 0
        self._puts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Connects to Redis; while it does not answer, every look-up is a miss."""
        for link in (self._reads, self._batches, self._writes):
            await link.reopen()
        return self

    async def __aexit__(self, *_: object) -> None:
        for link in (self._reads, self._batches, self._writes):
            await link.close()

    def state(self) -> CacheStoreBody:
        """Returns the state of this store for metrics and operators, as far as this gateway knows it."""
        return CacheStoreBody(
            backend="redis", answers=None, bytes=None, max_bytes=None, stores=self._stores, evictions=0
        )

    async def get(self, key: AnswerKey) -> StoredAnswer | None:
        """Returns an encoded answer; implements `AnswerBackend.get`."""
        try:
            ((value, fingerprint),) = await self._reads.send(
                ("MGET", self._answers + key.name, self._fingerprint_key(key))
            )
        except LinkLost:
            return None
        answer = self._answer_in(value)
        return None if answer is None else StoredAnswer(answer, (fingerprint or b"").decode(errors="replace"))

    def put(
        self, key: AnswerKey, answer: bytes, ttl_s: float, fingerprint: str, since_s: float = math.inf
    ) -> asyncio.Task[None] | None:
        """Keeps an encoded answer; implements `AnswerBackend.put`. Of very many at once, the last are not kept.

        Of the removals it knows those of this gateway.
        """
        return self._start_put([(key, answer)], ttl_s, fingerprint, since_s)

    def put_many(
        self, entries: Sequence[tuple[AnswerKey, bytes]], ttl_s: float, since_s: float = math.inf
    ) -> asyncio.Task[None] | None:
        """Keeps all entries; implements `EmbeddingBackend.put_many`, and limits them as `put` does."""
        return self._start_put(entries, ttl_s, "", since_s)

    def _start_put(
        self, entries: Sequence[tuple[AnswerKey, bytes]], ttl_s: float, fingerprint: str, since_s: float
    ) -> asyncio.Task[None] | None:
        entries = [entry for entry in entries if not self._removals.has_removed(entry[0], since_s)]
        if not entries or len(self._puts) >= _MOST_PUTS:
            return None
        task = asyncio.create_task(self._put(entries, ttl_s, fingerprint), name="answer for Redis")
        self._puts.add(task)
        task.add_done_callback(self._on_put)
        return task

    def _on_put(self, task: asyncio.Task[None]) -> None:
        self._puts.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("An answer was not kept in Redis.", exc_info=error)

    async def _put(self, entries: Sequence[tuple[AnswerKey, bytes]], ttl_s: float, fingerprint: str) -> None:
        commands = self._set_commands(entries, ttl_s)
        kept = len(commands)
        if not commands:
            return
        if fingerprint:
            commands.append(("SET", self._fingerprint_key(entries[0][0]), fingerprint, "EX", _FINGERPRINT_TTL_S))
        with suppress(LinkLost):
            await self._writes.send(*commands)
            self._stores += kept

    async def get_many(self, keys: Sequence[AnswerKey]) -> list[bytes | None]:
        """Returns what is kept under each key; implements `EmbeddingBackend.get_many`.

        One command for each key, because a reply to all of them would come late as a whole.
        """
        try:
            values = await self._batches.send(*(("GET", self._answers + key.name) for key in keys))
        except LinkLost:
            return [None] * len(keys)
        return [*map(self._answer_in, values)]

    async def remove(self, selection: AnswerSelection) -> int:
        """Removes answers and returns their number.

        Raises:
            StoreUnavailable: Redis is away.
        """
        self._removals.add(selection, self._clock.monotonic_s())
        removed = 0
        async for entries in self._entries(selection.name):
            chosen = [entry.key for entry in entries if _is_chosen(entry, selection)]
            if chosen:
                removed += (await self._ask(("UNLINK", *chosen)))[0]
        return removed

    async def describe(self) -> list[CachedAnswers]:
        """Returns what is kept, by tenant, model and epoch.

        An answer that is stored or removed meanwhile may count twice, or not at all.

        Raises:
            StoreUnavailable: Redis is away.
        """
        groups: dict[tuple[str, str, str], list[int]] = {}
        async for entries in self._entries():
            for entry in entries:
                if (head := entry.head) is not None:
                    groups.setdefault((head.tenant, head.model, head.epoch), []).append(entry.size)
        return [CachedAnswers(*names, len(sizes), sum(sizes)) for names, sizes in sorted(groups.items())]

    def _set_commands(self, entries: Sequence[tuple[AnswerKey, bytes]], ttl_s: float) -> list[tuple[Word, ...]]:
        commands: list[tuple[Word, ...]] = []
        for key, answer in entries:
            head = msgspec.msgpack.encode(_Head(key.tenant, key.model, self._clock.wall_s() + ttl_s, key.epoch))
            if len(head) > _MAX_HEAD_BYTES - _LENGTH_BYTES:
                continue  # a name that only a client can have thought of
            value = len(head).to_bytes(_LENGTH_BYTES) + head + answer
            commands.append(("SET", self._answers + key.name, value, "PX", max(1, round(ttl_s * 1000))))
        return commands

    def _answer_in(self, value: bytes | None) -> bytes | None:
        """Returns the answer in a value; None: there is none, or its time is over."""
        head = _head_of(value)
        if value is None or head is None or self._clock.wall_s() >= head.expires_s:
            return None
        return value[_head_bytes(value) :]

    async def _entries(self, name: str | None = None) -> AsyncIterator[list[_Entry]]:
        """Yields what is kept, in batches; with a name, only the answer of that name."""
        if name is not None:
            yield await self._look_at([(self._answers + name).encode()])
            return
        cursor: bytes | int = 0
        while True:
            scan = ("SCAN", cursor, "MATCH", f"{self._answers}*", "COUNT", _KEYS_PER_TURN, "TYPE", "string")
            ((cursor, keys),) = await self._ask(scan)
            if keys:
                yield await self._look_at(keys)
            if int(cursor) == 0:
                return

    async def _look_at(self, keys: Sequence[bytes]) -> list[_Entry]:
        heads = [("GETRANGE", key, 0, _MAX_HEAD_BYTES - 1) for key in keys]
        replies = await self._ask(*heads, *(("STRLEN", key) for key in keys))
        starts, lengths = replies[: len(keys)], replies[len(keys) :]
        return [
            _Entry(key, _head_of(start), length - _head_bytes(start))
            for key, start, length in zip(keys, starts, lengths, strict=True)
            if length
        ]

    async def _ask(self, *commands: tuple[Word, ...]) -> list[Any]:
        """Sends commands for an operator.

        Raises:
            StoreUnavailable: Redis is away.
        """
        if not self._writes.is_open:
            await self._writes.reopen()
        try:
            return await self._writes.send(*commands)
        except LinkLost as error:
            raise StoreUnavailable(
                f"The Redis of `cache.url` does not answer: {error}. Answers are computed until it does. Try again "
                "shortly."
            ) from error

    def _fingerprint_key(self, key: AnswerKey) -> str:
        return self._fingerprints + hashlib.blake2b(key.server.encode(), digest_size=16).hexdigest()


class _BackgroundLink:
    """Link that is opened again in the background, after a pause; until then calls fail at once.

    The pauses become longer, up to a second, until there is a reply.
    """

    def __init__(self, link: RedisLink, clock: Clock) -> None:
        self._link = link
        self._clock = clock
        self._next_attempt_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._opening: asyncio.Task[None] | None = None
        self._is_lost = False

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._link.is_open

    async def reopen(self) -> None:
        """Opens the link, unless the pause since the last failure goes on."""
        self._reopen_soon()
        if self._opening is not None:
            await asyncio.wait([self._opening])

    async def close(self) -> None:
        """Closes the link and stops opening it."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        await self._link.close()

    async def send(self, *commands: tuple[Word, ...]) -> list[Any]:
        """Sends commands; see `RedisLink.send`."""
        if not self._link.is_open:
            self._reopen_soon()
            raise LinkLost("there is no connection")
        if self._link.is_late:
            raise ReplyDelay("a reply is late")
        try:
            replies = await self._link.send(*commands)
        except ReplyDelay:
            raise
        except LinkLost as error:
            self._on_lost(error)
            raise
        self._pause_s = FIRST_PAUSE_S
        return replies

    def _reopen_soon(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s >= self._next_attempt_s and (self._opening is None or self._opening.done()):
            self._next_attempt_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_S)
            self._opening = asyncio.create_task(self._open(), name="redis of the cache")

    async def _open(self) -> None:
        try:
            await self._link.open()
        except LinkLost as error:
            self._on_lost(error)
        else:
            if self._is_lost:
                _log.info("The Redis of the cache of answers answers again.")
            self._is_lost = False

    def _on_lost(self, error: LinkLost) -> None:
        self._next_attempt_s = self._clock.monotonic_s() + self._pause_s
        if not self._is_lost:
            _log.warning(
                "The Redis of the cache of answers is away (%s). Answers are computed until it is back.", error
            )
        self._is_lost = True


def _head_bytes(value: bytes) -> int:
    return _LENGTH_BYTES + int.from_bytes(value[:_LENGTH_BYTES])


def _head_of(value: bytes | None) -> _Head | None:
    """Returns the head of a value; None: it has none."""
    if value is None:
        return None
    try:
        return _DECODER.decode(value[_LENGTH_BYTES : _head_bytes(value)])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _is_chosen(entry: _Entry, selection: AnswerSelection) -> bool:
    """Returns whether a selection has an entry; what is no answer is removed only together with all answers."""
    head = entry.head
    if head is None:
        return (selection.tenant, selection.model, selection.epoch) == (None, None, None)
    return (
        selection.tenant in (None, head.tenant)
        and selection.model in (None, head.model)
        and selection.epoch in (None, head.epoch)
    )
