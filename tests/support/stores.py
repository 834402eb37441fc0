"""Both databases, for tests that must hold on either."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from maitred.api.in_flight import InFlightLimiter
from maitred.api.responses.background import BackgroundResponses
from maitred.api.responses.routes import ResponsesRoutes
from maitred.api.routes import Route
from maitred.cache.config import IdempotencyConfig
from maitred.cache.memory import MemoryIdempotencyStore
from maitred.core.clock import Clock, SystemClock
from maitred.core.secret import Secret
from maitred.core.service import InferenceService
from maitred.store.config import StoreConfig
from maitred.store.database import Database, open_database
from maitred.store.journal import Journal
from maitred.store.ledger import UsageLedger
from maitred.store.response_claims import ResponseClaims
from maitred.store.responses import ResponseStore

DEADLINE_S = 300.0
"""One access to the database of a test may take so long: on a crowded machine, 5 s are not enough."""


@pytest.fixture(params=["sqlite", "postgresql"])
def store_config(request: pytest.FixtureRequest, tmp_path: Path) -> StoreConfig:
    """A new, empty database: an SQLite file, then one on a real PostgreSQL server."""
    if request.param == "sqlite":
        return StoreConfig(folder=str(tmp_path / "data"), deadline_s=DEADLINE_S)
    url: str = request.getfixturevalue("postgres_url")
    return StoreConfig(folder=str(tmp_path / "data"), url=Secret(url, "{env: TEST_STORE_URL}"), deadline_s=DEADLINE_S)


@contextmanager
def deadline(database: Database, seconds: float) -> Iterator[None]:
    """Statements that begin within the block have so much time; everything else has enough on a crowded machine."""
    usual_s, database._deadline_s = database._deadline_s, seconds
    try:
        yield
    finally:
        database._deadline_s = usual_s


@asynccontextmanager
async def open_responses(
    config: StoreConfig,
    clock: Clock | None = None,
    *,
    ttl_s: float = 3600.0,
    name: str = "journal",
    has_others: bool = False,
) -> AsyncIterator[tuple[ResponseStore, UsageLedger, Database]]:
    """The stored responses of one gateway, with the ledger that they are written with."""
    clock = clock or SystemClock()
    async with open_database(config) as database:
        ledger = UsageLedger(database, Journal(Path(config.folder) / name, durable=False), clock)
        claims = ResponseClaims(database, clock, f"gateway-{name}", claim_s=30.0, has_others=has_others)
        yield ResponseStore(database, ledger, clock, claims, ttl_s=ttl_s), ledger, database
        await ledger.close()


@asynccontextmanager
async def response_routes(folder: Path) -> AsyncIterator[Callable[[InferenceService], list[Route]]]:
    """The routes of the Responses API for a test's gateway, with a store of its own."""
    async with open_responses(StoreConfig(folder=str(folder), deadline_s=DEADLINE_S)) as (store, _, _):
        clock = SystemClock()
        recordings = MemoryIdempotencyStore(IdempotencyConfig(), clock)
        background = BackgroundResponses(store, recordings, InFlightLimiter(1000), heartbeat_s=15.0)
        yield lambda service: ResponsesRoutes(service, store, background, strict=False, heartbeat_s=15.0).routes()
