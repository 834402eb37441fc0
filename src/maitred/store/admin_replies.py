"""What administrative calls were answered, for clients that send one again because they did not hear the answer."""

from typing import Any

from sqlalchemy import delete, select

from maitred.core.clock import Clock
from maitred.core.errors import Conflict, InvalidRequest
from maitred.store.database import Database
from maitred.store.driver import make_insert
from maitred.store.schema import admin_replies

_KEPT_S = 86400.0
_LONGEST_KEY = 256


class AdminReplies:
    """Replies by the idempotency key that the client chose.

    Whatever is remembered can be read in the database: a reply that shows a new secret is no reply to remember whole.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._insert = make_insert(database.engine)

    async def remembered(self, key: str, body_hash: bytes) -> tuple[int, bytes] | None:
        """Status and body of the reply to an earlier call, if there was one within a day.

        Raises:
            Conflict: The earlier call asked for something else.
            InvalidRequest: That can be no idempotency key.
            StoreUnavailable: The database is away.
        """
        _check(key)
        query = select(admin_replies.c.body_hash, admin_replies.c.status, admin_replies.c.reply)
        fresh = admin_replies.c.time_s > self._clock.wall_s() - _KEPT_S
        async with self._database.reading() as connection:
            found = (await connection.execute(query.where(admin_replies.c.key == key, fresh))).one_or_none()
        if found is None:
            return None
        earlier, status, reply = found
        if earlier != body_hash:
            raise Conflict("That Idempotency-Key was used for another call. Send a new one with each new call.")
        return status, reply

    async def remember(self, key: str, body_hash: bytes, status: int, reply: bytes) -> None:
        """Keeps a reply for a day; of two to the same key, the first.

        Raises:
            InvalidRequest: That can be no idempotency key.
            StoreUnavailable: The database is away.
        """
        _check(key)
        now_s = self._clock.wall_s()
        row: dict[str, Any] = {"key": key, "body_hash": body_hash, "status": status, "reply": reply, "time_s": now_s}
        async with self._database.begin() as connection:
            await connection.execute(delete(admin_replies).where(admin_replies.c.time_s <= now_s - _KEPT_S))
            await connection.execute(self._insert(admin_replies).on_conflict_do_nothing(), row)


def _check(key: str) -> None:
    if not key or len(key) > _LONGEST_KEY or not key.isprintable():
        raise InvalidRequest(
            f"An Idempotency-Key has from 1 to {_LONGEST_KEY} printable characters.", param="Idempotency-Key"
        )
