"""Stored responses of the Responses API: conversations whose earlier turns a request names by an id.

A response is written in one transaction with the usage of its request (`maitred.store.ledger`) before its client gets
the end of it. The next request finds it therefore at once, at any gateway on the same database. A tenant finds its own
responses only; an organisation also finds those of its teams.
"""

import asyncio
import logging
import secrets
from typing import Any

from sqlalchemy import ColumnElement, delete, func, literal, select
from sqlalchemy.engine import Row

from maitred.core.clock import Clock
from maitred.core.errors import StoreUnavailable
from maitred.core.stored_response import StoredResponse
from maitred.core.tenancy import Principal
from maitred.store.conversations import MAX_CONVERSATION_BYTES, ConversationStore, check_size
from maitred.store.database import Database
from maitred.store.driver import make_insert
from maitred.store.ledger import UsageLedger
from maitred.store.response_claims import ResponseClaims
from maitred.store.schema import owned_by, response_items, responses, signing_key

log = logging.getLogger(__name__)

_BATCH = 500
"""Most responses that one statement reads."""
_SWEEP_INTERVAL_S = 600.0
_KEY_BYTES = 32
_COLUMNS = [responses.c[name] for name in StoredResponse.__struct_fields__ if name in responses.c]


class ResponseStore:
    """Store of responses in the database of the ledger.

    Args:
        database: The database.
        ledger: Ledger with the usage of the requests.
        clock: Clock for the age of responses.
        claims: Claims of this gateway on the responses that it runs in the background.
        ttl_s: Time in seconds for which a response is kept.

    Attributes:
        conversations: Store of the conversations that responses add to.
        claims: See above.
        is_enabled: Whether responses are stored at all.
        lifetime: Returns the wall times at which a response of now is made and expires.
    """

    def __init__(
        self, database: Database, ledger: UsageLedger, clock: Clock, claims: ResponseClaims, *, ttl_s: float
    ) -> None:
        self.conversations = ConversationStore(database, clock, ttl_s=ttl_s)
        self.claims = claims
        self._database = database
        self._ledger = ledger
        self._clock = clock
        self._signing_key: bytes | None = None
        self.is_enabled = self.conversations.is_enabled
        self.lifetime = self.conversations.lifetime

    async def save(self, response: StoredResponse) -> None:
        """Stores a response in one transaction with the usage that this gateway has recorded so far.

        One that ran in the background ends, if this gateway still owns it; else nothing is stored.

        Raises:
            StoreUnavailable: The database cannot be written.
        """
        await self._ledger.write_with(response)

    async def give_up(self, response_id: str) -> None:
        """Lets the usage of a request be billed without its response, if that was not stored."""
        await self._ledger.release(response_id)

    async def find(self, principal: Principal, response_id: str) -> StoredResponse | None:
        """Returns a response of the caller; None: there is none, or it is not the caller's."""
        query = select(*_COLUMNS).where(self._is_visible(principal), responses.c.id == response_id)
        async with self._database.begin_read() as connection:
            row = (await connection.execute(query)).one_or_none()
        return None if row is None else _of_row(row)

    async def find_by_item(self, principal: Principal, item_id: str) -> StoredResponse | None:
        """Returns the latest response of the caller with an item that its server has given this id; None: none has."""
        query = select(*_COLUMNS).join(response_items, response_items.c.response == responses.c.id)
        query = query.where(self._is_visible(principal), response_items.c.item == item_id)
        async with self._database.begin_read() as connection:
            row = (await connection.execute(query.order_by(responses.c.id.desc()).limit(1))).one_or_none()
        return None if row is None else _of_row(row)

    async def conversation(
        self, principal: Principal, response_id: str, *, max_bytes: int = MAX_CONVERSATION_BYTES
    ) -> list[StoredResponse]:
        """Returns a response of the caller with all before it in its conversation, in their order.

        The list is empty if there is no such response. It begins later than the conversation if one of the responses
        was deleted; then the first of the list names it as its `previous`.

        Raises:
            InvalidRequest: Its items have more than `max_bytes`.
        """
        columns, names = responses.c, ("id", "previous", "size")
        size = (func.length(columns.input) + func.length(columns.output)).label("size")
        visible = select(columns.id, columns.previous, size).where(self._is_visible(principal))
        first = visible.add_columns(literal(0).label("turn")).where(columns.id == response_id)
        turns = first.cte("turns", recursive=True)
        turns = turns.union_all(visible.add_columns(turns.c.turn + 1).where(columns.id == turns.c.previous))
        query = select(*(turns.c[name] for name in names)).order_by(turns.c.turn.desc())
        async with self._database.begin_read() as connection:
            found = [(row.id, row.size) for row in await connection.execute(query)]
            check_size(sum(size for _, size in found), max_bytes)
            rows: dict[str, StoredResponse] = {}
            for start in range(0, len(found), _BATCH):
                ids = [found_id for found_id, _ in found[start : start + _BATCH]]
                for row in await connection.execute(select(*_COLUMNS).where(columns.id.in_(ids))):
                    rows[row.id] = _of_row(row)
        return [rows[found_id] for found_id, _ in found]

    async def signing_key(self) -> bytes:
        """Returns the key with which all gateways on this database sign what their clients keep for them.

        Raises:
            StoreUnavailable: The database cannot be reached, and the key was never read.
        """
        if self._signing_key is None:
            drawn = {"id": 1, "key": secrets.token_bytes(_KEY_BYTES)}
            insert = make_insert(self._database.engine)(signing_key).on_conflict_do_nothing()
            async with self._database.begin() as connection:
                await connection.execute(insert, drawn)
                self._signing_key = (await connection.execute(select(signing_key.c.key))).scalar_one()
        return self._signing_key

    async def delete(self, principal: Principal, response_id: str) -> bool:
        """Deletes a response of the caller; returns whether there was one."""
        own = owned_by(responses, principal)
        async with self._database.begin() as connection:
            result = await connection.execute(delete(responses).where(responses.c.id == response_id, own))
        return result.rowcount > 0

    async def run(self) -> None:
        """Deletes responses and conversations whose time is over, until the task is cancelled."""
        while True:
            try:
                await self.sweep()
                await self.conversations.sweep()
            except StoreUnavailable as error:
                log.warning("Old responses cannot be deleted now: %s", error)
            await asyncio.sleep(_SWEEP_INTERVAL_S)

    async def sweep(self) -> int:
        """Deletes responses whose time is over; returns their number."""
        async with self._database.begin() as connection:
            result = await connection.execute(delete(responses).where(responses.c.expires_s <= self._clock.wall_s()))
        return result.rowcount

    def _is_visible(self, principal: Principal) -> ColumnElement[bool]:
        return owned_by(responses, principal) & (responses.c.expires_s > self._clock.wall_s())


def _of_row(row: Row[Any]) -> StoredResponse:
    return StoredResponse(**row._mapping)
