"""The ledger: from the journal into the database, off the path of requests, every event exactly once.

`record` appends to the journal and returns; `run` writes what has come together every half second, or sooner when a
batch is full. A batch is one transaction, which leaves out what the database has (see
`maitred.store.batch`). So a batch may be written again after a crash, from an orphaned journal, or by two adopters at
once, and `spend` stays the exact sum of the charges in `usage`.

While the database is away, events go on being journaled; the backlog grows on disk, not in memory, and is written once
the database is back.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from sqlalchemy import select

from maitred.core.clock import Clock
from maitred.core.errors import Bug, StoreUnavailable
from maitred.core.request import Usage
from maitred.core.usage import UsageEvent
from maitred.store.backlog import Backlog
from maitred.store.batch import BatchWriter
from maitred.store.database import Database
from maitred.store.journal import Journal
from maitred.store.orphan_journal import NOTHING, SurvivingWork, open_orphan, orphans
from maitred.store.recent_usage import RecentRateUsage, taken_since
from maitred.store.schema import StoredText, spend

log = logging.getLogger(__name__)

BATCH = 500
"""Events in one transaction, at most."""
_INTERVAL_S = 0.5
_ADOPT_EVERY_S = 30.0
_FIRST_RETRY_S = 0.2
_MOST_RETRY_S = 10.0
_MOST = 2**53
"""Of one amount; see `maitred.core.money`. Sums of them then fit the 64 bits of a column."""
_STORED = StoredText()
_Result = TypeVar("_Result")


Settle = Callable[[str, Mapping[str, int]], Awaitable[None]]
"""Ends a lease and charges what was used, as `maitred.core.counters.Counters.settle` does."""


class UsageLedger:
    """Implements `maitred.core.usage.Ledger`. Belongs to one event loop.

    Args:
        database: Where events go.
        journal: Owned, and closed by `close`.
        clock: Tells the age of the backlog, and when to look for orphans.
        most_events: Events of the backlog that are kept in memory.

    Attributes:
        carried: Ids of what dead processes had begun, and what runs still: to be recorded here, and not begun again.
    """

    def __init__(self, database: Database, journal: Journal, clock: Clock, *, most_events: int = 10_000) -> None:
        self._database = database
        self._journal = journal
        self._clock = clock
        self._backlog = Backlog(journal, most_events=most_events)
        self._writing = asyncio.Lock()  # between the commit of a batch and its leaving the backlog it counts twice
        self._full = asyncio.Event()
        self._tokens: dict[str, tuple[int, int, int]] = {}
        self._costs_nusd: Counter[str] = Counter()
        self._batches = BatchWriter(database)
        self._settle: Settle | None = None
        self.carried: set[str] = set()

    def begin(self, event: UsageEvent) -> None:
        """See `Ledger`.

        Raises:
            StoreUnavailable: The journal cannot be written; do not begin.
        """
        self._journal.begin(event)

    def record(self, event: UsageEvent) -> None:
        """See `Ledger`.

        Raises:
            StoreUnavailable: The journal cannot be written: the answer must not be ended as if it were billed.
            Bug: An amount is one that no database would take, and that would keep all later ones out with it.
        """
        model, tokens = event.model, (event.prompt_tokens, event.output_tokens, event.cached_tokens)
        amounts = (*tokens, event.cost_nusd, *event.charges.values())
        if min(amounts) < 0 or max(amounts) > _MOST:
            raise Bug(f"Request {event.request_id} cannot have used {amounts}. Report what its replica is.")
        if self._backlog.add(event) >= BATCH:
            self._full.set()
        if model in self._tokens:
            prompt, output, cached = self._tokens[model]
            tokens = (prompt + tokens[0], output + tokens[1], cached + tokens[2])
        self._tokens[model] = tokens
        self._costs_nusd[model] += event.cost_nusd

    @property
    def backlog(self) -> int:
        """Events that are journaled and not in the database yet."""
        return len(self._backlog)

    @property
    def backlog_age_s(self) -> float:
        """How long the oldest of them has been waiting."""
        oldest_s = self._backlog.oldest_s
        return 0.0 if oldest_s is None else max(0.0, self._clock.wall_s() - oldest_s)

    def totals(self) -> dict[str, Usage]:
        """Model -> tokens recorded since this process started, to be held against the engine's own counters."""
        return {model: Usage(*tokens) for model, tokens in self._tokens.items()}

    def costs_nusd(self) -> dict[str, int]:
        """Model -> what requests of it have cost since this process started, in nano-dollars."""
        return dict(self._costs_nusd)

    async def spent(self, counters: Sequence[str]) -> dict[str, int]:
        """What has been charged to budget counters so far, in nano-dollars.

        What this gateway has journaled is included, written or not. What others have journaled and not written yet is
        not: with several gateways on one database that is some half a second of theirs.

        Raises:
            StoreUnavailable: The database cannot be read.
        """
        stored = {counter: _STORED.process_bind_param(counter, self._database.engine.dialect) for counter in counters}
        query = select(spend.c.counter, spend.c.charged_nusd).where(spend.c.counter.in_(counters))
        async with self._writing:
            async with self._database.reading() as connection:
                written = {counter: charged for counter, charged in await connection.execute(query)}  # noqa: C416 - typed
            waiting = self._backlog.charged(counters)
        return {counter: written.get(stored[counter], 0) + waiting[counter] for counter in counters}

    async def taken_since(self, since_s: float) -> RecentRateUsage:
        """What was taken from rates since then. What is journaled here and waits is written first.

        Raises:
            StoreUnavailable: The database is away.
        """
        await self.flush()
        return await taken_since(self._database, since_s)

    async def replay(self, settle: Settle | None = None, outlived: SurvivingWork = NOTHING) -> int:
        """Writes what dead processes have left in the journal's folder. Call it before serving, or budgets miss it.

        Args:
            settle: Called for each event with its id, which is that of its lease, and what it charged and took: shared
                counters may still hold that lease. From then on, what is found later is settled too.
            outlived: What has outlived the process that had begun it; see `carried`.

        Returns:
            How many events were found; some may have been in the database already.

        Raises:
            StoreUnavailable: The database cannot be written, or a journal not be read. Nothing is lost by that.
        """
        self._settle = settle or self._settle
        found = 0
        for folder in orphans(self._journal.folder):
            with open_orphan(folder, outlived) as orphan:
                if orphan is None:
                    continue
                count = 0
                for batch in orphan.batches(BATCH):
                    await _whole(self._batches.write(batch))
                    if self._settle is not None:
                        for event in batch:
                            await self._settle(event.id, {**event.charges, **event.taken})
                    count += len(batch)
                if self._settle is not None:
                    for event in orphan.unanswered:
                        await self._settle(event.id, {})
                for event in orphan.carried:
                    if event.id not in self.carried:
                        self._journal.begin(event)
                        self.carried.add(event.id)
                orphan.remove()
                if count:
                    log.warning(
                        "Took %d usage events from the journal of a dead gateway; %d of its requests were interrupted.",
                        count,
                        orphan.interrupted,
                    )
                found += count
        return found

    async def flush(self) -> None:
        """Writes the backlog.

        Raises:
            StoreUnavailable: The database is away; what is not written stays.
        """
        while await _whole(self._write_oldest()):
            pass
        self._full.clear()

    async def run(self) -> None:
        """Writes until it is cancelled; then call `close`."""
        retry_s = _FIRST_RETRY_S
        adopt_at_s = self._clock.monotonic_s() + _ADOPT_EVERY_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_INTERVAL_S):
                    await self._full.wait()
            try:
                await self.flush()
                if self._clock.monotonic_s() >= adopt_at_s:
                    adopt_at_s = self._clock.monotonic_s() + _ADOPT_EVERY_S
                    await self.replay()
                retry_s = _FIRST_RETRY_S
            except Exception as error:  # whatever it is, usage must go on being written once it has passed
                log.warning(
                    "Usage cannot be written to the database now; %d events wait in the journal: %s",
                    self.backlog,
                    error,
                    exc_info=not isinstance(error, StoreUnavailable),
                )
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))  # not in step with other gateways
                retry_s = min(2 * retry_s, _MOST_RETRY_S)

    async def close(self, deadline_s: float = 5.0) -> None:
        """Writes what is left, as far as the deadline allows; the next start finds the rest in the journal.

        A batch that is being written when the deadline passes still gets the database's own.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self.flush()
        except (TimeoutError, StoreUnavailable):
            log.warning("%d usage events stay in the journal; the next start writes them.", self.backlog)
        finally:
            self._backlog.close()

    async def _write_oldest(self) -> int:
        async with self._writing:
            batch = self._backlog.oldest(BATCH)
            await self._batches.write(batch)
            self._backlog.written(len(batch))
            return len(batch)


async def _whole(step: Coroutine[None, None, _Result]) -> _Result:
    """Lets a step end even if its caller is cancelled; the database's deadline bounds the wait.

    A batch that was committed and did not leave the backlog would count twice until it is written again, and a
    connection that is cut off within a transaction is lost.
    """
    task = asyncio.create_task(step, name="usage batch")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
