"""Stored replies to administrative calls, so that a client can repeat a call without harm.

A reply is kept for a day. A client whose connection broke repeats the call and gets the stored reply.
"""

from typing import Any

from sqlalchemy import delete, select

from maitred.core.clock import Clock
from maitred.core.errors import Conflict, InvalidRequest
from maitred.store.database import Database
from maitred.store.driver import make_insert
from maitred.store.schema import admin_replies

_RETENTION_S = 86400.0
_MAX_KEY_LENGTH = 256


class AdminReplies:
    """Store of replies by the idempotency key that the client chose.

    Every stored reply can be read in the database. A reply that shows a new secret must not be stored whole.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._insert = make_insert(database.engine)

    async def find_reply(self, key: str, body_hash: bytes) -> tuple[int, bytes] | None:
        """Returns status and body of the reply to an earlier call with this key, from the last day, or None.

        Raises:
            Conflict: The earlier call asked for something else.
            InvalidRequest: The key is not a valid idempotency key.
            StoreUnavailable: The database cannot be reached.
        """
        _check_key(key)
        query = select(admin_replies.c.body_hash, admin_replies.c.status, admin_replies.c.reply)
        fresh = admin_replies.c.time_s > self._clock.wall_s() - _RETENTION_S
        async with self._database.begin_read() as connection:
            found = (await connection.execute(query.where(admin_replies.c.key == key, fresh))).one_or_none()
        if found is None:
            return None
        earlier_hash, status, reply = found
        if earlier_hash != body_hash:
            raise Conflict("That Idempotency-Key was used for another call. Send a new one with each new call.")
        return status, reply

    async def store_reply(self, key: str, body_hash: bytes, status: int, reply: bytes) -> None:
        """Stores a reply for one day; if two replies have the same key, the first is kept.

        Raises:
            InvalidRequest: The key is not a valid idempotency key.
            StoreUnavailable: The database cannot be reached.
        """
        _check_key(key)
        now_s = self._clock.wall_s()
        row: dict[str, Any] = {"key": key, "body_hash": body_hash, "status": status, "reply": reply, "time_s": now_s}
        async with self._database.begin() as connection:
            await connection.execute(delete(admin_replies).where(admin_replies.c.time_s <= now_s - _RETENTION_S))
            await connection.execute(self._insert(admin_replies).on_conflict_do_nothing(), row)


def _check_key(key: str) -> None:
    if not key or len(key) > _MAX_KEY_LENGTH or not key.isprintable():
        raise InvalidRequest(
            f"An Idempotency-Key has from 1 to {_MAX_KEY_LENGTH} printable characters.", param="Idempotency-Key"
        )
