"""Which gateways may share one PostgreSQL."""

import asyncio

import asyncpg
import pytest

from maitred.core.errors import ConfigInvalid, StoreUnavailable
from maitred.core.secret import Secret
from maitred.store import database_lock
from maitred.store.config import StoreConfig
from maitred.store.database_lock import lock_database
from tests.support.stores import DEADLINE_S


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(database_lock, "_CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(database_lock, "_POLL_S", 0.05)


@pytest.fixture
def config(postgres_url):
    return StoreConfig(url=Secret(postgres_url, "{env: URL}"), deadline_s=DEADLINE_S)


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
async def test_two_gateways_share_a_database_only_if_both_count_elsewhere(config, first, second, is_refused):
    async with lock_database(config, exclusive=first):
        if is_refused:
            with pytest.raises(ConfigInvalid, match=r"counters\.url"):
                async with lock_database(config, exclusive=second):
                    pass
        else:
            async with lock_database(config, exclusive=second):
                pass
    async with lock_database(config, exclusive=True):
        pass  # it is free again


async def test_the_next_gateway_waits_for_one_that_is_about_to_end(config):
    async def hold():
        async with lock_database(config, exclusive=True):
            held.set()
            await asyncio.sleep(0.2)

    held = asyncio.Event()
    holding = asyncio.create_task(hold())
    await held.wait()
    async with lock_database(config, exclusive=True):
        await holding


async def test_a_lock_that_was_lost_with_its_connection_is_taken_again(config, postgres_url):
    """As after a restart of the server."""
    locks = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted"
    server = await asyncpg.connect(postgres_url)
    try:
        async with lock_database(config, exclusive=True):
            (before,) = [row["pid"] for row in await server.fetch(locks)]
            await server.execute("SELECT pg_terminate_backend($1)", before)
            async with asyncio.timeout(300):
                while True:
                    after = {row["pid"] for row in await server.fetch(locks)}
                    if after and before not in after:
                        break
                    await asyncio.sleep(0.05)
            with pytest.raises(ConfigInvalid):
                async with lock_database(config, exclusive=True):
                    pass
    finally:
        await server.close()


async def test_a_server_that_does_not_answer_is_named_without_its_password():
    url = Secret("postgresql://maitred:hunter2@127.0.0.1:1/accounts", "{env: URL}")
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1/accounts") as caught:
        async with lock_database(StoreConfig(url=url), exclusive=True):
            pass
    assert "hunter2" not in caught.value.message


async def test_sqlite_has_a_lock_of_its_own(tmp_path):
    config = StoreConfig(folder=str(tmp_path), url=Secret(f"sqlite:///{tmp_path}/a.db", "{env: URL}"))
    async with lock_database(config, exclusive=True), lock_database(config, exclusive=True):
        pass
