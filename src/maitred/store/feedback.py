"""What callers thought of answers: at most one opinion for each line of the ledger.

An opinion lies beside its line and not in it, because lines are written once and never changed. A second opinion takes
the place of the first, so that whoever sends the same twice has said it once.
"""

from collections.abc import Awaitable, Callable

from sqlalchemy import or_, select
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.clock import Clock
from maitred.core.errors import ResourceNotFound
from maitred.core.feedback import Feedback, FeedbackReceipt
from maitred.core.tenancy import Principal
from maitred.store.database import Database
from maitred.store.driver import make_insert
from maitred.store.schema import feedback as opinions
from maitred.store.schema import usage


class FeedbackStore:
    """Takes opinions. Any gateway on the same database takes those of any request.

    Args:
        database: Where the ledger is.
        flush: Writes the lines that this gateway has journaled and that are not in the database yet.
        clock: For the times of opinions.
    """

    def __init__(self, database: Database, flush: Callable[[], Awaitable[None]], clock: Clock) -> None:
        self._database = database
        self._flush = flush
        self._clock = clock
        self._insert = make_insert(database.engine)

    async def store(self, principal: Principal, request_id: str, feedback: Feedback) -> FeedbackReceipt:
        """Keeps what a caller thinks of a request, in place of what was thought of it before.

        Where several requests had that id, the last one is meant.

        Args:
            principal: Who says it. Requests of its own tenant are open to it, and those of its teams.
            request_id: What the client was told.
            feedback: The opinion.

        Raises:
            ResourceNotFound: No such request, or it is none of the caller's business; which of the two is not told.
            StoreUnavailable: The database is away.
        """
        kept = await self._kept(principal, request_id, feedback)
        if kept is None:
            await self._flush()  # an answer can be rated before its line has left the journal
            kept = await self._kept(principal, request_id, feedback)
        if kept is None:
            raise ResourceNotFound(
                "No request of yours has this id. Send the x-request-id of its answer, with a key of the tenant that "
                "asked. A request that has just ended at another gateway is known after a second; one that was refused "
                "never is.",
                param="request_id",
            )
        return kept

    async def _kept(self, principal: Principal, request_id: str, feedback: Feedback) -> FeedbackReceipt | None:
        own = principal.tenants[0]
        line = (
            select(usage.c.id, usage.c.model, usage.c.rollout)
            .where(usage.c.request_id == request_id, or_(usage.c.tenant == own, usage.c.organisation == own))
            .order_by(usage.c.time_s.desc(), usage.c.id.desc())
            .limit(1)
        )
        async with self._database.begin() as connection:
            found = (await connection.execute(line)).one_or_none()
            if found is None:
                return None
            before = await self._before(connection, found.id)
            said = {
                "score": feedback.score,
                "text": feedback.text,
                "tags": list(feedback.tags),
                "key": principal.key,
                "time_s": self._clock.wall_s(),
            }
            insert = self._insert(opinions).values(usage=found.id, **said)
            await connection.execute(insert.on_conflict_do_update(index_elements=[opinions.c.usage], set_=said))
        return FeedbackReceipt(feedback, found.model, found.rollout, before)

    async def _before(self, connection: AsyncConnection, line: str) -> Feedback | None:
        query = select(opinions).where(opinions.c.usage == line).with_for_update()
        row = (await connection.execute(query)).mappings().one_or_none()
        return None if row is None else feedback_in(row)


def feedback_in(row: RowMapping) -> Feedback:
    """An opinion as a row of the table has it."""
    return Feedback(score=row["score"], text=row["text"], tags=tuple(row["tags"]))
