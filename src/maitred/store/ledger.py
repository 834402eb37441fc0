"""Ledger: moves usage events from the journal into the database in the background, exactly once each.

`record` appends to the journal and returns; `run` writes what has accumulated every half second, or sooner when a batch
is full. Each batch is one transaction, which skips events that the database already has (see `maitred.store.batch`). A
batch may therefore be written again after a crash, from an orphaned journal, or by two adopters at once, and `spend`
stays the exact sum of the charges in `usage`.

While the database cannot be reached, events are still journaled; the backlog grows on disk and not in memory, and is
written when the database is available again.
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
from maitred.core.stored_response import StoredResponse
from maitred.core.usage import Settle, UsageEvent
from maitred.store.batch import Backlog, BatchWriter
from maitred.store.database import Database
from maitred.store.journal import Journal
from maitred.store.orphan_journal import (
    NOTHING_SURVIVED,
    SurvivingWork,
    interrupted_event,
    journal_folders,
    open_orphan,
)
from maitred.store.recent_usage import RecentRateUsage, read_rate_usage
from maitred.store.schema import StoredText, spend, usage

log = logging.getLogger(__name__)

BATCH_EVENTS = 500
"""Largest number of events in one transaction."""
_INTERVAL_S = 0.5
_ADOPT_INTERVAL_S = 30.0
_FIRST_RETRY_S = 0.2
_MAX_RETRY_S = 10.0
_MAX_AMOUNT = 2**53
"""Largest single amount; see `maitred.core.usage`.

Sums of such amounts fit into a 64-bit column.
"""
_TEXT_TYPE = StoredText()
_Result = TypeVar("_Result")


SettleLease = Callable[[str, Mapping[str, int], str], Awaitable[None]]
"""Function that settles a lease with its amounts; the last argument names the dead gateway that held it."""
ReleaseGateway = Callable[[str, Sequence[str]], Awaitable[None]]
"""Function that releases what a dead gateway held besides its leases; the second argument names those that go on."""


class UsageLedger:
    """Ledger in a database, with a journal in front; implements `maitred.core.usage.Ledger`.

    The ledger belongs to one event loop.

    Args:
        database: The database that events are written to.
        journal: The journal; the ledger owns it, and `close` closes it.
        clock: Clock for the age of the backlog and the search for orphans.
        max_events: Largest number of backlog events that are kept in memory.

    Attributes:
        surviving_ids: Ids of events that dead processes have begun and whose requests are still running: this ledger
            records them and does not begin them again.
    """

    def __init__(self, database: Database, journal: Journal, clock: Clock, *, max_events: int = 10_000) -> None:
        self._database = database
        self._journal = journal
        self._clock = clock
        self._backlog = Backlog(journal, max_events=max_events)
        self._write_lock = (
            asyncio.Lock()
        )  # this lock exists because a batch would count twice between its commit and its removal from the backlog
        self._batch_is_full = asyncio.Event()
        self._recorded_tokens: dict[str, tuple[int, int, int]] = {}
        self._costs_nusd: Counter[str] = Counter()
        self._writer = BatchWriter(database)
        self._settle_lease: SettleLease | None = None
        self._release_gateway: ReleaseGateway | None = None
        self._responses: list[tuple[StoredResponse, asyncio.Future[Exception | None]]] = []
        """Responses that wait for the next transaction."""
        self._settlements: dict[str, list[Settle]] = {}
        """Settlements of usage that waits for a response, by its id."""
        self.surviving_ids: set[str] = set()

    def begin(self, event: UsageEvent) -> None:
        """Records that a request has begun to use tokens. Implements `Ledger.begin`.

        Raises:
            StoreUnavailable: The journal cannot be written; the request must not begin.
        """
        self._journal.begin(event)

    def record(self, event: UsageEvent, response: str = "", settle: Settle | None = None) -> bool:
        """Records what a request has used. Implements `Ledger.record`.

        Usage that is recorded for a response stays in the journal until `write_with` or `release` with this response.

        Raises:
            StoreUnavailable: The journal cannot be written; the caller must not end the response as if it were billed.
            Bug: An amount is too large for the database, so it would block all later events too.
        """
        model, tokens = event.model, (event.prompt_tokens, event.output_tokens, event.cached_tokens)
        amounts = (*tokens, event.saved_tokens, event.cost_nusd, *event.charges.values())
        if min(amounts) < 0 or max(amounts) > _MAX_AMOUNT:
            raise Bug(f"Request {event.request_id} cannot have used {amounts}. Report what its replica is.")
        if self._backlog.add(event, response) >= BATCH_EVENTS:
            self._batch_is_full.set()
        if model in self._recorded_tokens:
            prompt, output, cached = self._recorded_tokens[model]
            tokens = (prompt + tokens[0], output + tokens[1], cached + tokens[2])
        self._recorded_tokens[model] = tokens
        self._costs_nusd[model] += event.cost_nusd
        waits = self._backlog.awaits(response)
        if waits and settle is not None:
            self._settlements.setdefault(response, []).append(settle)
        return waits

    @property
    def backlog(self) -> int:
        """Number of events that are in the journal and not yet in the database."""
        return len(self._backlog)

    @property
    def backlog_age_s(self) -> float:
        """Age of the oldest event in the backlog, or 0 if the backlog is empty."""
        oldest_s = self._backlog.oldest_s
        return 0.0 if oldest_s is None else max(0.0, self._clock.wall_s() - oldest_s)

    def token_totals(self) -> dict[str, Usage]:
        """Returns the tokens recorded by model since the start, to compare with the engine's counters."""
        return {model: Usage(*tokens) for model, tokens in self._recorded_tokens.items()}

    def costs_nusd(self) -> dict[str, int]:
        """Returns the cost of requests by model since this process started, in nano-dollars."""
        return dict(self._costs_nusd)

    async def spent(self, counters: Sequence[str]) -> dict[str, int]:
        """Returns the charged totals of budget counters so far, in nano-dollars.

        The total includes all usage that this gateway has journaled, written to the database or not. Usage that other
        gateways have journaled and not written yet is not: with several gateways on one database that is about half a
        second of theirs.

        Raises:
            StoreUnavailable: The database cannot be read.
        """
        stored_names = {
            counter: _TEXT_TYPE.process_bind_param(counter, self._database.engine.dialect) for counter in counters
        }
        query = select(spend.c.counter, spend.c.charged_nusd).where(spend.c.counter.in_(counters))
        async with self._write_lock:
            async with self._database.begin_read() as connection:
                written_charges = {counter: charged for counter, charged in await connection.execute(query)}  # noqa: C416 - typed
            pending_charges = self._backlog.pending_charges(counters)
        return {
            counter: written_charges.get(stored_names[counter], 0) + pending_charges[counter] for counter in counters
        }

    async def rate_usage_since(self, since_s: float) -> RecentRateUsage:
        """Returns the amounts that requests took from rates since a wall time; writes the backlog first.

        Raises:
            StoreUnavailable: The database cannot be reached.
        """
        await self.flush()
        return await read_rate_usage(self._database, since_s)

    async def replay(
        self,
        settle_lease: SettleLease | None = None,
        surviving: SurvivingWork = NOTHING_SURVIVED,
        *,
        release_gateway: ReleaseGateway | None = None,
    ) -> int:
        """Writes the journals of dead processes to the database.

        This must run before the gateway serves requests, because budgets would otherwise miss that usage.

        Args:
            settle_lease: Called for each event with its id (which is the id of its lease) and the amounts that it
                charged and took, because shared counters may still hold that lease. Later replays call it too.
            surviving: Requests that are still running after the process that began them has died; see `surviving_ids`.
            release_gateway: Called with the name of each journal whose events are all settled, and with the ids of
                those that survive. Later replays call it too.

        Returns:
            Number of events that were found; the database may already have some of them.

        Raises:
            StoreUnavailable: The database cannot be written, or a journal cannot be read. All usage stays in the
                journals.
        """
        self._settle_lease = settle_lease or self._settle_lease
        self._release_gateway = release_gateway or self._release_gateway
        event_count = 0
        for folder in journal_folders(self._journal.folder):
            with open_orphan(folder, surviving) as orphan:
                if orphan is None:
                    continue
                count = 0
                for batch in orphan.batches(BATCH_EVENTS):
                    await self._write_orphaned(batch, folder.name)
                    count += len(batch)
                for start in range(0, len(orphan.unstored), BATCH_EVENTS):
                    batch = orphan.unstored[start : start + BATCH_EVENTS]
                    written = await self._written_ids(batch)
                    orphan.interrupted += len(batch) - len(written)
                    await self._write_orphaned(
                        [event if event.id in written else interrupted_event(event) for event in batch], folder.name
                    )
                    count += len(batch)
                if self._settle_lease is not None:
                    for event in orphan.unanswered:
                        await self._settle_lease(event.id, {}, folder.name)
                for event in orphan.surviving:
                    if event.id not in self.surviving_ids:
                        self._journal.begin(event)
                        self.surviving_ids.add(event.id)
                if self._release_gateway is not None:
                    await self._release_gateway(folder.name, [event.id for event in orphan.surviving])
                orphan.remove()
                if count:
                    log.warning(
                        "Took %d usage events from the journal of a dead gateway; %d of its requests were interrupted.",
                        count,
                        orphan.interrupted,
                    )
                event_count += count
        return event_count

    async def _write_orphaned(self, batch: Sequence[UsageEvent], gateway: str) -> None:
        """Writes events of a dead process, and settles the leases of their requests."""
        await _run_to_end(self._writer.write(batch))
        if self._settle_lease is not None:
            for event in batch:
                await self._settle_lease(event.id, {**event.charges, **event.taken}, gateway)

    async def _written_ids(self, events: Sequence[UsageEvent]) -> set[str]:
        """Returns the ids of the events that the database has."""
        query = select(usage.c.id).where(usage.c.id.in_([event.id for event in events]))
        async with self._database.begin_read() as connection:
            return set(await connection.scalars(query))

    async def flush(self) -> None:
        """Writes the whole backlog to the database, but for usage that waits for its response.

        Raises:
            StoreUnavailable: The database cannot be reached; unwritten events stay in the backlog.
        """
        while await _run_to_end(self._write_oldest()):
            pass
        self._batch_is_full.clear()

    async def write_with(self, response: StoredResponse) -> None:
        """Writes a response in one transaction with its usage.

        Responses that wait for the same transaction are written together.

        Raises:
            StoreUnavailable: The database cannot be reached; the response is not stored.
        """
        written: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._responses.append((response, written))
        await _run_to_end(self._write_responses())
        if (error := await written) is not None:
            raise error
        if response.id in self._settlements:
            await _run_to_end(self._settle_usage_of(response.id))

    async def release(self, response_id: str) -> None:
        """Lets usage that still waits for a response be billed without it: the response is not stored."""
        self._backlog.release(response_id)
        if response_id in self._settlements:
            await _run_to_end(self._settle_usage_of(response_id))

    async def run(self) -> None:
        """Writes the backlog repeatedly until the task is cancelled; the caller must then call `close`."""
        retry_s = _FIRST_RETRY_S
        adopt_at_s = self._clock.monotonic_s() + _ADOPT_INTERVAL_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_INTERVAL_S):
                    await self._batch_is_full.wait()
            try:
                await self.flush()
                if self._clock.monotonic_s() >= adopt_at_s:
                    adopt_at_s = self._clock.monotonic_s() + _ADOPT_INTERVAL_S
                    await self.replay()
                retry_s = _FIRST_RETRY_S
            # After any error, the loop must try again, so that usage is written when the cause is gone
            except Exception as error:
                log.warning(
                    "Usage cannot be written to the database now; %d events wait in the journal: %s",
                    self.backlog,
                    error,
                    exc_info=not isinstance(error, StoreUnavailable),
                )
                # The random factor keeps gateways from retrying at the same time
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
                retry_s = min(2 * retry_s, _MAX_RETRY_S)

    async def close(self, deadline_s: float = 5.0) -> None:
        """Writes the rest of the backlog until the deadline; the next start reads what is left.

        A batch that is being written at the deadline may still use the deadline of the database.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self.flush()
        except (TimeoutError, StoreUnavailable):
            log.warning("%d usage events stay in the journal; the next start writes them.", self.backlog)
        finally:
            self._backlog.close()

    async def _write_responses(self) -> None:
        """Writes the waiting responses with the oldest events, and tells each that waits how it went."""
        async with self._write_lock:
            waiting, self._responses = self._responses, []
            if not waiting:
                return
            failure: Exception | None = None
            try:
                batch = self._backlog.oldest_events(BATCH_EVENTS, [response.id for response, _ in waiting])
                await self._writer.write([*batch.values()], [response for response, _ in waiting])
                self._backlog.mark_written(batch)
            except Exception as error:  # `write_with` raises it to each that waits
                failure = error
            for _, written in waiting:
                if not written.done():
                    written.set_result(failure)

    async def _settle_usage_of(self, response_id: str) -> None:
        for settle in self._settlements.pop(response_id, ()):
            await settle()

    async def _write_oldest(self) -> int:
        async with self._write_lock:
            batch = self._backlog.oldest_events(BATCH_EVENTS)
            await self._writer.write([*batch.values()])
            self._backlog.mark_written(batch)
            return len(batch)


async def _run_to_end(step: Coroutine[None, None, _Result]) -> _Result:
    """Runs a step to its end even if the caller is cancelled.

    The deadline of the database bounds the wait.

    If a batch is committed and stays in the backlog, it counts twice until it is written again; and a connection that
    is interrupted within a transaction is lost.
    """
    task = asyncio.create_task(step, name="usage batch")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
