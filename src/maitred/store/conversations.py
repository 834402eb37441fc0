"""Stored conversations of the Responses API: lists of items that responses add to.

A tenant finds its own conversations only; an organisation also finds those of its teams. Items are added in a
transaction that locks their conversation, so that each has a position of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import asdict
from sqlalchemy import ColumnElement, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.clock import Clock
from maitred.core.errors import InvalidRequest
from maitred.core.stored_response import StoredConversation, StoredItem
from maitred.core.tenancy import Principal
from maitred.store.database import Database
from maitred.store.schema import conversation_items, conversations, owned_by

MAX_CONVERSATION_BYTES = 16 * 1024 * 1024
"""Most bytes of items that one request reads."""
_COLUMNS = [conversations.c[name] for name in StoredConversation.__struct_fields__]


class ConversationStore:
    """Store of conversations in the database of the ledger.

    Args:
        database: The database.
        clock: Clock for the age of conversations.
        ttl_s: Time in seconds for which a conversation is kept after its last use.

    Attributes:
        is_enabled: Whether conversations are stored at all.
    """

    def __init__(self, database: Database, clock: Clock, *, ttl_s: float) -> None:
        self._database = database
        self._clock = clock
        self._ttl_s = ttl_s
        self.is_enabled = ttl_s > 0

    def lifetime(self) -> tuple[float, float]:
        """Returns the wall times at which a conversation of now is made and expires."""
        now_s = self._clock.wall_s()
        return now_s, now_s + self._ttl_s

    async def create(self, conversation: StoredConversation, items: Sequence[StoredItem]) -> None:
        """Stores a new conversation with its first items."""
        async with self._database.begin() as connection:
            await connection.execute(insert(conversations), asdict(conversation))
            await append_items(connection, conversation.id, items, conversation.expires_s)

    async def find(self, principal: Principal, conversation_id: str) -> StoredConversation | None:
        """Returns a conversation of the caller; None: there is none, or it is not the caller's."""
        query = select(*_COLUMNS).where(self._is_visible(principal, conversation_id))
        async with self._database.begin_read() as connection:
            row = (await connection.execute(query)).one_or_none()
        return None if row is None else StoredConversation(**row._mapping)

    async def set_metadata(self, principal: Principal, conversation_id: str, metadata: Mapping[str, str]) -> bool:
        """Replaces the metadata of a conversation of the caller; returns whether there is one."""
        change = update(conversations).where(self._is_visible(principal, conversation_id))
        async with self._database.begin() as connection:
            changed = await connection.execute(change.values(metadata=dict(metadata), expires_s=self.lifetime()[1]))
        return changed.rowcount > 0

    async def delete(self, principal: Principal, conversation_id: str) -> bool:
        """Deletes a conversation of the caller with its items; returns whether there was one."""
        async with self._database.begin() as connection:
            removed = await connection.execute(
                delete(conversations).where(owned_by(conversations, principal), conversations.c.id == conversation_id)
            )
        return removed.rowcount > 0

    async def add(self, principal: Principal, conversation_id: str, items: Sequence[StoredItem]) -> bool:
        """Adds items to a conversation of the caller; returns whether there is one."""
        visible = select(conversations.c.id).where(self._is_visible(principal, conversation_id))
        async with self._database.begin() as connection:
            if (await connection.execute(visible)).one_or_none() is None:
                return False
            return await append_items(connection, conversation_id, items, self.lifetime()[1])

    async def items(self, conversation_id: str, *, max_bytes: int = MAX_CONVERSATION_BYTES) -> list[StoredItem]:
        """Returns all items of a conversation in their order.

        Raises:
            InvalidRequest: They have more than `max_bytes`.
        """
        columns = conversation_items.c
        query = select(columns.id, columns.item).where(columns.conversation == conversation_id)
        size = select(func.sum(func.length(columns.item))).where(columns.conversation == conversation_id)
        async with self._database.begin_read() as connection:
            check_size(await connection.scalar(size) or 0, max_bytes)
            return [StoredItem(*row) for row in await connection.execute(query.order_by(columns.position))]

    async def delete_item(self, conversation_id: str, item_id: str) -> bool:
        """Deletes an item of a conversation; returns whether there was one."""
        columns = conversation_items.c
        async with self._database.begin() as connection:
            removed = await connection.execute(
                delete(conversation_items).where(columns.conversation == conversation_id, columns.id == item_id)
            )
        return removed.rowcount > 0

    async def sweep(self) -> int:
        """Deletes conversations whose time is over; returns their number."""
        is_over = conversations.c.expires_s <= self._clock.wall_s()
        async with self._database.begin() as connection:
            return (await connection.execute(delete(conversations).where(is_over))).rowcount

    def _is_visible(self, principal: Principal, conversation_id: str) -> ColumnElement[bool]:
        is_alive = conversations.c.expires_s > self._clock.wall_s()
        return owned_by(conversations, principal) & is_alive & (conversations.c.id == conversation_id)


def check_size(size: int, max_bytes: int) -> None:
    """Raises InvalidRequest for a conversation with more bytes than one request reads."""
    if size > max_bytes:
        raise InvalidRequest(
            f"The stored conversation has {size:,} bytes, and a request reads at most {max_bytes:,}. Begin a new one."
        )


async def append_items(
    connection: AsyncConnection, conversation_id: str, items: Sequence[StoredItem], expires_s: float
) -> bool:
    """Adds items to a conversation, whose time begins anew; returns whether there is such a conversation."""
    # The update locks the conversation until the transaction ends.
    is_it = conversations.c.id == conversation_id
    changed = await connection.execute(update(conversations).where(is_it).values(expires_s=expires_s))
    if not changed.rowcount:
        return False
    columns = conversation_items.c
    query = select(func.coalesce(func.max(columns.position), -1)).where(columns.conversation == conversation_id)
    last: int = await connection.scalar(query) or 0
    rows: list[dict[str, Any]] = [
        {"conversation": conversation_id, "position": position, "id": item.id, "item": item.item}
        for position, item in enumerate(items, last + 1)
    ]
    if rows:
        await connection.execute(insert(conversation_items), rows)
    return True
