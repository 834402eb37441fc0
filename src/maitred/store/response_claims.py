"""Claims of gateways on responses that run in the background.

The row of such a response exists from its beginning and names its owner, the gateway that runs it. A gateway that may
have others beside it claims its rows for some time, again and again. A response whose owner has let its claim pass is
lost: the first gateway that sees this marks it as failed, so that nothing runs for ever. What its owner has settled
stays settled; the ledger does not depend on claims.

A gateway without others needs no claims: whatever another owner runs when this one starts is lost.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence

from sqlalchemy import ColumnElement, false, insert, select, update

from maitred.core.clock import Clock
from maitred.core.errors import StoreUnavailable
from maitred.core.stored_response import BackgroundClaim, StoredResponse
from maitred.store.database import Database
from maitred.store.schema import responses, row_of
from maitred.wire.responses.resource import end_without_answer

log = logging.getLogger(__name__)

_BATCH = 500
"""Most responses that one statement names."""
_RENEWALS = 3
"""Renewals of a claim before it would pass."""
_RETRY_S = 1.0
"""Time until a gateway without others tries again to end what is lost."""


class ResponseClaims:
    """Claims of one gateway on the responses that it runs, and its eye on those of others.

    Args:
        database: The database of the responses.
        clock: Clock for claims. The clocks of gateways that share a database may differ by half of `claim_s`.
        owner: Id of this gateway, which no other process has.
        claim_s: Time in seconds after its last renewal at which a claim passes.
        has_others: Whether other gateways may run responses of this database.

    Attributes:
        owner: See above.
        has_others: See above.
        renew_every_s: Time in seconds after which claims are to be renewed.
    """

    def __init__(self, database: Database, clock: Clock, owner: str, *, claim_s: float, has_others: bool) -> None:
        self._database = database
        self._clock = clock
        self._claim_s = claim_s
        self.owner = owner
        self.has_others = has_others
        self.renew_every_s = claim_s / _RENEWALS

    async def begin(self, response: StoredResponse) -> None:
        """Stores a response that begins, which this gateway owns.

        Raises:
            StoreUnavailable: The database cannot be written.
        """
        row = {**row_of(responses, response), "owner": self.owner, "claimed_until_s": self._claim_end_s()}
        async with self._database.begin() as connection:
            await connection.execute(insert(responses), row)

    async def update(self, response_id: str, resource: bytes) -> None:
        """Stores the present state of a response that this gateway owns."""
        own = (responses.c.id == response_id) & (responses.c.owner == self.owner)
        async with self._database.begin() as connection:
            await connection.execute(update(responses).where(own).values(resource=resource))

    async def renew(self, response_ids: Sequence[str]) -> None:
        """Claims responses that this gateway owns for another time."""
        for ids in _batches(response_ids):
            own = responses.c.id.in_(ids) & (responses.c.owner == self.owner)
            async with self._database.begin() as connection:
                await connection.execute(update(responses).where(own).values(claimed_until_s=self._claim_end_s()))

    async def read(self, response_ids: Sequence[str]) -> Mapping[str, BackgroundClaim]:
        """Returns what the database says of these responses; one that was deleted is missing."""
        claims: dict[str, BackgroundClaim] = {}
        columns = responses.c
        for ids in _batches(response_ids):
            query = select(columns.id, columns.owner, columns.cancelled).where(columns.id.in_(ids))
            async with self._database.begin_read() as connection:
                for response_id, owner, cancelled in await connection.execute(query):
                    claims[response_id] = BackgroundClaim(owner, cancelled)
        return claims

    async def cancel(self, response_id: str) -> None:
        """Asks the owner of a response to cancel it; without effect on one that has ended."""
        runs = (responses.c.id == response_id) & responses.c.owner.is_not(None)
        async with self._database.begin() as connection:
            await connection.execute(update(responses).where(runs).values(cancelled=True))

    async def run(self) -> None:
        """Ends lost responses until the task is cancelled, or until there can be no more."""
        answered_s = 0.0
        while True:
            try:
                if not self.has_others:
                    await self.end_lost()
                    return
                # While the database was away, nobody could renew a claim.
                if answered_s >= self._claim_s:
                    await self.end_lost()
                else:
                    await self._end(false())
                answered_s += self.renew_every_s
            except StoreUnavailable as error:
                answered_s = 0.0
                log.warning("Responses in the background cannot be looked after now: %s", error)
            await asyncio.sleep(self.renew_every_s if self.has_others else _RETRY_S)

    async def release(self) -> None:
        """Ends what this gateway still owns, because it stops."""
        await self._end(responses.c.owner == self.owner)

    async def end_lost(self) -> int:
        """Ends the responses that no living gateway owns; returns their number."""
        if self.has_others:
            return await self._end(responses.c.claimed_until_s <= self._clock.wall_s())
        return await self._end(responses.c.owner != self.owner)

    async def _end(self, which: ColumnElement[bool]) -> int:
        """Marks running responses as failed, or as cancelled where that was asked for."""
        ended = 0
        while found := await self._end_some(which):
            ended += found
        if ended:
            log.warning("%d responses in the background were lost with their gateway.", ended)
        return ended

    async def _end_some(self, which: ColumnElement[bool]) -> int:
        columns = responses.c
        query = select(columns.id, columns.owner, columns.claimed_until_s, columns.resource, columns.cancelled)
        async with self._database.begin() as connection:
            found = (await connection.execute(query.where(columns.owner.is_not(None), which).limit(_BATCH))).all()
            for row in found:
                # Unless its owner has renewed the claim meanwhile.
                same = (columns.owner == row.owner) & (columns.claimed_until_s == row.claimed_until_s)
                resource = end_without_answer(row.resource, cancelled=row.cancelled)
                change = update(responses).where(columns.id == row.id, same)
                await connection.execute(change.values(resource=resource, owner=None, claimed_until_s=None))
        return len(found)

    def _claim_end_s(self) -> float:
        return self._clock.wall_s() + self._claim_s


def _batches(response_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(response_ids), _BATCH):
        yield response_ids[start : start + _BATCH]
