"""Feedback of callers on responses: at most one opinion for each ledger entry.

Feedback is stored in a table of its own, because ledger entries are written once and never changed. A second opinion
replaces the first opinion, so that repeated feedback counts once.
"""

from collections.abc import Awaitable, Callable

from sqlalchemy import select
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.clock import Clock
from maitred.core.errors import ResourceNotFound
from maitred.core.tenancy import Principal
from maitred.core.usage import Feedback, FeedbackReceipt
from maitred.store.database import Database
from maitred.store.driver import make_insert
from maitred.store.schema import feedback as opinions
from maitred.store.schema import owned_by, usage


class FeedbackStore:
    """Store of feedback. Any gateway on the same database takes feedback on any request.

    Args:
        database: The database of the ledger.
        flush: Writes the ledger entries that this gateway has journaled and the database does not have yet.
        clock: Clock for the times of feedback.
    """

    def __init__(self, database: Database, flush: Callable[[], Awaitable[None]], clock: Clock) -> None:
        self._database = database
        self._flush = flush
        self._clock = clock
        self._insert = make_insert(database.engine)

    async def store(self, principal: Principal, request_id: str, feedback: Feedback) -> FeedbackReceipt:
        """Stores a caller's feedback on a request and replaces earlier feedback on it.

        If several requests have that id, the feedback applies to the last request.

        Args:
            principal: The caller; it may rate requests of its own tenant and of the teams of its tenant.
            request_id: The id that the client received.
            feedback: The opinion.

        Raises:
            ResourceNotFound: The request does not exist, or the caller may not see it; the error does not say which of
                the two.
            StoreUnavailable: The database cannot be reached.
        """
        receipt = await self._store_if_found(principal, request_id, feedback)
        if receipt is None:
            await self._flush()  # a client can rate an answer before its ledger entry has reached the database
            receipt = await self._store_if_found(principal, request_id, feedback)
        if receipt is None:
            raise ResourceNotFound(
                "No request of yours has this id. Send the x-request-id of its answer, with a key of the tenant that "
                "asked. A request that has just ended at another gateway is known after a second; one that was refused "
                "never is.",
                param="request_id",
            )
        return receipt

    async def _store_if_found(
        self, principal: Principal, request_id: str, feedback: Feedback
    ) -> FeedbackReceipt | None:
        query = (
            select(usage.c.id, usage.c.model, usage.c.rollout)
            .where(usage.c.request_id == request_id, owned_by(usage, principal))
            .order_by(usage.c.time_s.desc(), usage.c.id.desc())
            .limit(1)
        )
        async with self._database.begin() as connection:
            found = (await connection.execute(query)).one_or_none()
            if found is None:
                return None
            previous = await self._previous(connection, found.id)
            values = {
                "score": feedback.score,
                "text": feedback.text,
                "tags": list(feedback.tags),
                "key": principal.key,
                "time_s": self._clock.wall_s(),
            }
            insert = self._insert(opinions).values(usage=found.id, **values)
            await connection.execute(insert.on_conflict_do_update(index_elements=[opinions.c.usage], set_=values))
        return FeedbackReceipt(feedback, found.model, found.rollout, previous)

    async def _previous(self, connection: AsyncConnection, usage_id: str) -> Feedback | None:
        query = select(opinions).where(opinions.c.usage == usage_id).with_for_update()
        row = (await connection.execute(query)).mappings().one_or_none()
        return None if row is None else feedback_from_row(row)


def feedback_from_row(row: RowMapping) -> Feedback:
    """Converts a row of the feedback table."""
    return Feedback(score=row["score"], text=row["text"], tags=tuple(row["tags"]))
