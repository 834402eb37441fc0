"""Stores and counters of the gateway, opened together and closed in the right order.

::

    database <- directory (tenants, keys, limits)
             <- ledger <- journal
             <- feedback on ledger entries
             <- responses, written with ledger entries
             <- scopes of the semantic cache
             <- leases, decisions and shared demand of scalers
    counters (memory | Redis)
    answers in the cache (memory | Redis)

The counters read the spent amounts from the ledger, and the ledger passes them the usage that a dead gateway could not
settle.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maitred.app.runtime import PauseFreeClock
from maitred.cache.answer_cache import open_backend
from maitred.cache.backend import MemoryBackend
from maitred.config.tree import Config
from maitred.core.clock import Clock
from maitred.core.counters import Counters
from maitred.core.ids import new_object_id
from maitred.store.counters.memory import MemoryCounters
from maitred.store.database import open_database
from maitred.store.directory import DirectoryStore
from maitred.store.feedback import FeedbackStore
from maitred.store.journal import Journal
from maitred.store.ledger import UsageLedger
from maitred.store.location import data_folder
from maitred.store.orphan_journal import NOTHING_SURVIVED, SurvivingWork
from maitred.store.response_claims import ResponseClaims
from maitred.store.responses import ResponseStore
from maitred.store.rollouts import RolloutStore
from maitred.store.scaling.demand import DemandExchange
from maitred.store.scaling.lease import ScalerLeases
from maitred.store.semantic import SemanticStore
from maitred.store.usage import UsageQueries

if TYPE_CHECKING:
    from maitred.cache.redis_backend import RedisBackend
    from maitred.store.counters.redis import RedisCounters

_log = logging.getLogger(__name__)

_JOURNAL = "journal"
_MOST_RECALLED_S = 3600.0
"""Longest time back to which the ledger is read; reading more would delay the start of a busy gateway."""


@dataclass(frozen=True, slots=True)
class GatewayStores:
    """All stores of one gateway."""

    directory: DirectoryStore
    journal: Journal
    ledger: UsageLedger
    usage: UsageQueries
    feedback: FeedbackStore
    responses: ResponseStore
    counters: Counters
    rollouts: RolloutStore
    scaler_leases: ScalerLeases
    scaling_demands: DemandExchange
    semantic: SemanticStore
    answers: "MemoryBackend | RedisBackend"


@asynccontextmanager
async def open_stores(
    config: Config, clock: Clock, outlived: SurvivingWork = NOTHING_SURVIVED
) -> AsyncIterator[GatewayStores]:
    """Opens all stores; before this returns, the usage left by dead gateways is in the ledger.

    The process that serves must hold the data lock before this call.

    Args:
        config: The configuration.
        clock: The clock.
        outlived: The work that has survived the process which admitted it.

    Raises:
        ConfigInvalid: A setting refers to something that cannot be used.
        StoreUnavailable: The database cannot be reached.
    """
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(open_database(config.store))
        folder = data_folder(config.store) / _JOURNAL
        journal = Journal(folder, durable=config.store.durable_journal)
        ledger = UsageLedger(database, journal, clock)
        stack.push_async_callback(ledger.close)
        counters = await _counters(config, clock, ledger, journal.name, stack)
        if isinstance(counters, MemoryCounters):
            await ledger.replay(surviving=outlived)
        else:
            # These counters have outlived dead gateways. What their journals say is settled now.
            await ledger.replay(counters.settle_orphan, outlived, release_gateway=counters.release_gateway)
        await stack.enter_async_context(running(ledger.run(), "usage ledger"))
        claims = ResponseClaims(
            database,
            clock,
            new_object_id("gateway"),
            claim_s=config.admission.lease_s,
            has_others=config.counters.url is not None,  # those that count in memory lock the database
        )
        await stack.enter_async_context(running(claims.run(), "lost responses"))
        responses = ResponseStore(database, ledger, clock, claims, ttl_s=config.store.response_ttl_s)
        await stack.enter_async_context(running(responses.run(), "old responses"))
        semantic = SemanticStore(database, clock)
        await stack.enter_async_context(running(semantic.run(), "old scopes"))
        yield GatewayStores(
            directory=DirectoryStore(database, clock),
            journal=journal,
            ledger=ledger,
            usage=UsageQueries(database),
            feedback=FeedbackStore(database, ledger.flush, clock),
            responses=responses,
            counters=counters,
            rollouts=RolloutStore(database, clock),
            scaler_leases=ScalerLeases(database, clock),
            scaling_demands=DemandExchange(database),
            semantic=semantic,
            answers=await stack.enter_async_context(open_backend(config.cache, clock)),
        )


async def restore_rates(stores: GatewayStores, clock: Clock) -> None:
    """Restores the rates of the previous gateway; call it when all limits are known.

    Counters in Redis outlive gateways and do not need this. Counters in memory get the amounts from the ledger, as far
    back as the slowest rate takes to refill ten times; so only a rate that was used at more than nine tenths all this
    time can begin with less than it had.

    Raises:
        StoreUnavailable: The database cannot be read.
    """
    if isinstance(stores.counters, MemoryCounters):
        refill_s = await stores.directory.longest_refill_s()
        since_s = clock.wall_s() - min(10 * refill_s, _MOST_RECALLED_S)
        taken = await stores.ledger.rate_usage_since(since_s)
        stores.counters.restore_buckets(taken.counters, taken.since_s, refill_s)


async def _counters(
    config: Config, clock: Clock, ledger: UsageLedger, gateway: str, stack: AsyncExitStack
) -> "MemoryCounters | RedisCounters":
    if config.counters.url is None:
        # The leases are renewed three times before they end; only a pause, or an event loop that is late by as much,
        # makes the gateway miss a renewal.
        steady = PauseFreeClock(clock, config.admission.lease_s / 3)
        await stack.enter_async_context(running(steady.run(), "steady clock"))
        return MemoryCounters(steady, ledger.spent)
    from maitred.store.counters.redis import RedisCounters

    return await stack.enter_async_context(RedisCounters(config.counters, clock, gateway, read_spent=ledger.spent))


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[asyncio.Task[None]]:
    """Runs a background task for as long as the block lasts.

    If the task fails, its error is logged at once, and the end of the block raises it.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("The background task %r has ended by an error.", task.get_name(), exc_info=error)
