"""Parts that all admin routes of the directory share: store, clock and the steps after a change."""

import base64
import hashlib
import logging
from asyncio import Lock
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec

from maitred.api.exchange import HttpExchange
from maitred.core.clock import Clock
from maitred.core.errors import Conflict, InvalidRequest, MaitredError
from maitred.core.tenancy import Principal
from maitred.store.directory import DirectoryStore
from maitred.wire.admin.responses import encode
from maitred.wire.openai.faults import format_value

log = logging.getLogger(__name__)

E = TypeVar("E")

Refresh = Callable[[], Awaitable[None]]
"""Applies the changes in the store to this gateway at once."""

_REPLAYED = (b"x-maitred-idempotent-replay", b"true")


class AdminReply(NamedTuple):
    """Reply to a request that created something."""

    answer: msgspec.Struct
    again: tuple[int, bytes] | None = None
    """Status and body for a repeat of the request; None: the same reply."""


class DirectoryAdmin:
    """Reads and changes the directory for the routes.

    A request with an ``Idempotency-Key`` is done once. The reply is stored after the work, in another transaction; so
    that a crash between the two creates nothing twice, ids that the caller does not choose are derived from the key,
    and the second attempt finds that its id is taken.

    Args:
        store: book: Store of tenants, keys and limits.
        refresh: Applies a change to this gateway at once; other gateways see it within a second.
        clock: Clock for expiry times.
        holds: Returns whether an accepted principal would still be accepted.
    """

    def __init__(
        self, book: DirectoryStore, refresh: Refresh, clock: Clock, holds: Callable[[Principal], bool]
    ) -> None:
        self.store = book
        self.holds = holds
        self._refresh = refresh
        self._clock = clock
        self._busy: WeakValueDictionary[str, Lock] = WeakValueDictionary()

    def now_s(self) -> float:
        """Returns the wall time in seconds."""
        return self._clock.wall_s()

    async def on_change(self) -> None:
        """Applies a change to this gateway; called after every change, before the answer."""
        try:
            await self._refresh()
        except MaitredError as error:
            # The change is stored, so the answer must not be an error; the change takes effect with the next poll.
            log.warning("A change of the directory could not be applied at once: %s", error.message)

    async def reply(self, exchange: HttpExchange, answer: msgspec.Struct) -> None:
        """Sends the answer as JSON."""
        await exchange.respond(encode(answer))

    async def once(self, exchange: HttpExchange, make: Callable[[], Awaitable[AdminReply]]) -> None:
        """Creates something and answers; a repeat of an earlier request gets only the answer.

        Raises:
            InvalidRequest: The idempotency key is invalid.
            Conflict: The idempotency key was used before with another body.
        """
        name = _name_of(exchange)
        if name is None:
            await self.reply(exchange, (await make()).answer)
            return
        body_hash = hashlib.sha256(exchange.body).digest()
        # Two repeats on this gateway wait for each other; on two gateways, one of them finds that the id is taken.
        async with self._busy.setdefault(name, Lock()):
            if await self._replay(exchange, name, body_hash):
                return
            try:
                made = await make()
            except Conflict:
                if await self._replay(exchange, name, body_hash):  # another gateway was faster
                    return
                raise
            reply = encode(made.answer)
            await self.store.store_reply(name, body_hash, *(made.again or (200, reply)))
        await exchange.respond(reply)

    async def _replay(self, exchange: HttpExchange, name: str, body_hash: bytes) -> bool:
        """Answers as before if the request is a repeat; returns whether it is."""
        known = await self.store.find_reply(name, body_hash)
        if known is not None:
            status, reply = known
            await exchange.respond(reply, status=status, headers=[_REPLAYED])
        return known is not None

    def id_for(self, exchange: HttpExchange, length: int) -> str | None:
        """Returns the id of an idempotent request's object, the same for each repeat. Other requests get None."""
        name = _name_of(exchange)
        if name is None:
            return None
        digest = hashlib.sha256(name.encode()).digest()
        return base64.b32encode(digest).decode("ascii").lower()[:length]


def page_of(entries: Sequence[E], limit: int) -> tuple[list[E], bool]:
    """Returns one page of entries, and whether another follows; one entry more than the limit was read."""
    return list(entries[:limit]), len(entries) > limit


def _name_of(exchange: HttpExchange) -> str | None:
    """Returns the request's idempotency key, made distinct by caller and by route."""
    key = exchange.header(b"idempotency-key")
    if key is None:
        return None
    if not key or len(key) > 255 or not key.isascii() or not key.isprintable():
        raise InvalidRequest(
            f"Idempotency-Key must be 1 to 255 printable ASCII characters; got {format_value(key)}.",
            param="Idempotency-Key",
        )
    return hashlib.sha256(f"{exchange.principal.key} {exchange.method} {exchange.path} {key}".encode()).hexdigest()
