"""Opening a database: migrations, several openers, and what callers see while it is away."""

import asyncio
import sqlite3
import stat
import sys
import threading
import time
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import TextClause, insert, select, text, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError

from maitred.core.errors import ConfigInvalid, StoreUnavailable
from maitred.core.secret import Secret
from maitred.store.config import StoreConfig
from maitred.store.database import Database, open_database
from maitred.store.migration import upgrade
from maitred.store.schema import directory_version, metadata, spend, usage
from tests.support.servers.postgres_server import PostgresServer
from tests.support.stores import deadline

LIMIT_S = 300.0
"""What takes longer hangs."""
SLOW = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10000000000) SELECT count(*) FROM n"
"""A statement that takes an hour in SQLite."""
SLEEP = "SELECT pg_sleep(3600)"
"""The same in PostgreSQL, which goes on with it until the usual deadline: it takes no processor from other tests."""


def _slow_statement(store_config: StoreConfig) -> TextClause:
    return text(SLOW if store_config.url is None else SLEEP)


async def _version(database: Database) -> int:
    async with database.begin_read() as connection:
        return int((await connection.execute(select(directory_version.c.version))).scalar_one())


def _differences(connection: Connection) -> list[object]:
    return list(compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), metadata))


def _described(connection: Connection) -> list[tuple[object, ...]]:
    """All that a database says of its tables, and the rows of those that are not empty when they are new."""
    if connection.dialect.name == "sqlite":
        queries = ["SELECT type, name, tbl_name, sql FROM sqlite_schema"]
    else:
        queries = [
            "SELECT table_name, ordinal_position, column_name, data_type, character_maximum_length, collation_name, "
            "is_nullable, column_default FROM information_schema.columns WHERE table_schema = 'public'",
            "SELECT conrelid::regclass::text, conname, contype::text, pg_get_constraintdef(oid) FROM pg_constraint "
            "WHERE connamespace = 'public'::regnamespace",
            "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
            "SELECT relname, relkind::text FROM pg_class WHERE relnamespace = 'public'::regnamespace",
        ]
    queries += ["SELECT * FROM alembic_version", "SELECT * FROM directory_version"]
    rows = [row for query in queries for row in connection.execute(text(query))]
    # Columns that were added later stand on the line of the last one before them.
    return sorted(
        (tuple(" ".join(part.split()) if isinstance(part, str) else part for part in row) for row in rows), key=repr
    )


def _migrate_from_nothing(connection: Connection) -> None:
    metadata.drop_all(connection)
    connection.execute(text("DROP TABLE alembic_version"))
    upgrade(connection, set())


async def test_all_migrations_make_what_a_new_database_has(store_config: StoreConfig) -> None:
    async with open_database(store_config) as database:
        async with database.begin_read() as connection:
            new = await connection.run_sync(_described)
        async with database.begin() as connection:
            await connection.run_sync(_migrate_from_nothing)
            assert await connection.run_sync(_differences) == []
            assert await connection.run_sync(_described) == new
    assert {table.name for table in metadata.sorted_tables} <= {part for row in new for part in row}


async def test_a_new_database_has_the_tables_of_the_schema_and_may_be_opened_again(store_config: StoreConfig) -> None:
    for _ in range(2):
        async with open_database(store_config) as database:
            assert await _version(database) == 0
            async with database.begin_read() as connection:
                assert await connection.run_sync(_differences) == []
            async with database.begin() as connection:
                rows = (await connection.execute(select(directory_version))).all()
                assert rows == [(1, 0)]


async def test_there_is_never_a_second_version_row(store_config: StoreConfig) -> None:
    async with open_database(store_config) as database:
        with pytest.raises(IntegrityError):
            async with database.begin() as connection:
                await connection.execute(insert(directory_version).values(id=2, version=9))


async def test_many_openers_at_once_migrate_once(store_config: StoreConfig) -> None:
    async def opened() -> int:
        async with open_database(store_config) as database:
            return await _version(database)

    assert await asyncio.gather(*(opened() for _ in range(6))) == [0] * 6


async def test_two_processes_open_an_empty_database_at_once(store_config: StoreConfig) -> None:
    program = (
        "import asyncio, sys\n"
        "from maitred.core.secret import Secret\n"
        "from maitred.store.config import StoreConfig\n"
        "from maitred.store.database import open_database\n"
        "async def main():\n"
        "    url = Secret(sys.argv[2], '') if sys.argv[2] else None\n"
        "    async with open_database(StoreConfig(folder=sys.argv[1], url=url)):\n"
        "        print('open')\n"
        "asyncio.run(main())\n"
    )
    url = store_config.url.reveal() if store_config.url is not None else ""
    command = [sys.executable, "-c", program, store_config.folder, url]
    processes = [
        await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        for _ in range(2)
    ]
    for process in processes:
        output, complained = await asyncio.wait_for(process.communicate(), 300)
        assert (output, complained, process.returncode) == (b"open\n", b"", 0)
    async with open_database(store_config) as database:
        assert await _version(database) == 0


async def test_a_database_of_a_newer_version_is_left_alone(store_config: StoreConfig) -> None:
    async with open_database(store_config) as database, database.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConfigInvalid, match="newer version of maitred"):
        async with open_database(store_config):
            pass


async def test_a_transaction_that_raises_changes_nothing(store_config: StoreConfig) -> None:
    async with open_database(store_config) as database:

        async def fail() -> None:
            async with database.begin() as connection:
                await connection.execute(update(directory_version).values(version=5))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert await _version(database) == 0


async def test_a_reader_sees_one_moment(store_config: StoreConfig) -> None:
    async with open_database(store_config) as database, database.begin_read() as connection:
        query = select(directory_version.c.version)
        assert (await connection.execute(query)).scalar_one() == 0
        async with database.begin() as writer:
            await writer.execute(update(directory_version).values(version=7))
        assert (await connection.execute(query)).scalar_one() == 0


async def test_a_wrong_statement_is_our_fault_and_no_outage(store_config: StoreConfig) -> None:
    async with open_database(store_config) as database:
        with pytest.raises(DBAPIError):
            async with database.begin_read() as connection:
                await connection.execute(text("SELECT nonsense FROM nowhere"))


async def test_waiting_for_the_writer_ends_at_the_deadline(store_config: StoreConfig) -> None:
    async with open_database(store_config) as one, open_database(store_config) as other:
        async with one.begin() as connection:
            await connection.execute(update(directory_version).values(version=1))
            started_s = time.monotonic()
            with deadline(other, 2.0), pytest.raises(StoreUnavailable):
                async with other.begin() as second:
                    await second.execute(update(directory_version).values(version=2))
            assert 1.9 < time.monotonic() - started_s < LIMIT_S
        assert await _version(other) == 1


async def test_text_that_postgresql_would_refuse_is_stored_all_the_same(store_config: StoreConfig) -> None:
    row = {
        "id": "u\0", "request_id": "r\ud800", "time_s": 1.0, "key": "k", "tenant": "t", "organisation": "o",
        "model": "m", "replica": "", "route": "🦙\n", "prompt_tokens": 2**40, "cached_tokens": 0, "output_tokens": 0,
        "price": "", "cost_nusd": 2**62, "ttft_s": None, "duration_s": 0.0, "outcome": "finished",
        "charges": {"a'; --": 1}, "taken": {"b\0": 2}, "rollout": "",
        "cache_write_tokens": 0, "cache": "exact", "saved_tokens": 2**40,
    }  # fmt: skip
    async with open_database(store_config) as database:
        async with database.begin() as connection:
            await connection.execute(insert(usage), [row])
        async with database.begin_read() as connection:
            kept = (await connection.execute(select(usage))).mappings().one()
    assert dict(kept) == row | {"id": "u\ufffd", "request_id": "r\ufffd"}


async def test_a_killed_server_is_unavailable_within_the_deadline_and_returns_by_itself(
    postgres_server: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    config = StoreConfig(folder=str(tmp_path), url=Secret(postgres_url, ""), deadline_s=LIMIT_S)
    async with open_database(config) as database:
        # Several connections are open when it dies.
        await asyncio.gather(*(_version(database) for _ in range(4)))
        postgres_server.kill()
        try:
            started_s = time.monotonic()
            results = await asyncio.gather(*(_version(database) for _ in range(8)), return_exceptions=True)
            assert {type(result) for result in results} == {StoreUnavailable}
            assert time.monotonic() - started_s < LIMIT_S
            with pytest.raises(StoreUnavailable):
                async with open_database(config):
                    pass
        finally:
            postgres_server.start()
        assert await asyncio.gather(*(_version(database) for _ in range(8))) == [0] * 8


async def test_a_server_that_dies_within_a_transaction_is_unavailable(
    postgres_server: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    config = StoreConfig(folder=str(tmp_path), url=Secret(postgres_url, ""), deadline_s=LIMIT_S)
    async with open_database(config) as database:

        async def write() -> None:
            async with database.begin() as connection:
                await connection.execute(insert(spend).values(counter="c", charged_nusd=1))
                postgres_server.kill()
                await connection.execute(insert(spend).values(counter="d", charged_nusd=1))

        try:
            with pytest.raises(StoreUnavailable):
                await write()
        finally:
            postgres_server.start()
        async with database.begin_read() as connection:
            assert (await connection.execute(select(spend))).all() == []


async def test_a_server_that_hangs_is_unavailable_within_the_deadline(
    postgres_server: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    config = StoreConfig(folder=str(tmp_path), url=Secret(postgres_url, ""), deadline_s=LIMIT_S)
    async with open_database(config) as database:
        await asyncio.gather(*(_version(database) for _ in range(3)))
        with postgres_server.paused(), deadline(database, 2.0):
            started_s = time.monotonic()
            results = await asyncio.gather(*(_version(database) for _ in range(8)), return_exceptions=True)
            assert {type(result) for result in results} == {StoreUnavailable}
            assert time.monotonic() - started_s < LIMIT_S
        assert await asyncio.gather(*(_version(database) for _ in range(8))) == [0] * 8


async def test_a_wrong_password_or_an_unknown_database_is_unavailable(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    url = f"postgresql://maitred@127.0.0.1:{postgres_server.port}/nowhere"
    with pytest.raises(StoreUnavailable):
        async with open_database(StoreConfig(folder=str(tmp_path), url=Secret(url, ""))):
            pass


async def test_the_sqlite_folder_is_private_and_the_file_has_a_write_ahead_log(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    async with open_database(StoreConfig(folder=str(folder))) as database, database.begin_read() as connection:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        pragmas = {
            name: (await connection.execute(text(f"PRAGMA {name}"))).scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 1, "foreign_keys": 1}


async def test_a_file_that_is_no_database_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "maitred.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreUnavailable):
        async with open_database(StoreConfig(folder=str(tmp_path))):
            pass


async def test_a_locked_sqlite_file_is_unavailable_and_returns_by_itself(tmp_path: Path) -> None:
    async with open_database(StoreConfig(folder=str(tmp_path), deadline_s=LIMIT_S)) as database:
        other_writer = sqlite3.connect(tmp_path / "maitred.db", isolation_level=None)
        other_writer.execute("BEGIN IMMEDIATE")
        with deadline(database, 2.0), pytest.raises(StoreUnavailable):
            async with database.begin() as connection:
                await connection.execute(update(directory_version).values(version=1))
        assert await _version(database) == 0  # Readers go on.
        other_writer.execute("ROLLBACK")
        other_writer.close()
        async with database.begin() as connection:
            await connection.execute(update(directory_version).values(version=1))
        assert await _version(database) == 1


async def test_a_statement_that_takes_too_long_is_given_up(store_config: StoreConfig) -> None:
    async with open_database(store_config) as database:
        started_s = time.monotonic()
        with deadline(database, 2.0), pytest.raises(StoreUnavailable):
            async with database.begin_read() as connection:
                await connection.execute(_slow_statement(store_config))
        assert time.monotonic() - started_s < LIMIT_S
        assert await _version(database) == 0


async def test_a_caller_that_leaves_gives_its_connection_back(store_config: StoreConfig) -> None:
    async with open_database(store_config) as database:

        async def leave() -> None:
            async with database.begin() as connection:
                await connection.execute(update(directory_version).values(version=3))
                await asyncio.Event().wait()

        for _ in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(leave(), 0.02)
        assert await _version(database) == 0


async def test_a_caller_may_leave_in_the_middle_of_a_statement(store_config: StoreConfig) -> None:
    # On SQLite the statement goes on until the deadline: its thread cannot be reached before.
    async with open_database(store_config) as database:

        async def ask() -> None:
            async with database.begin() as connection:
                await connection.execute(update(directory_version).values(version=3))
                await connection.execute(_slow_statement(store_config))

        for _ in range(3):
            with deadline(database, 5.0):
                asking = asyncio.create_task(ask())
                await asyncio.wait([asking], timeout=0.2)
            started_s = time.monotonic()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert time.monotonic() - started_s < LIMIT_S
            assert await _version(database) == 0
    # What closes a connection may end a moment after its caller.
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others or not (await asyncio.wait(others, timeout=LIMIT_S))[1]
    # A thread whose statement goes on tells the loop when it ends.
    for thread in threading.enumerate():
        if "_connection_worker_thread" in thread.name:
            await asyncio.to_thread(thread.join, LIMIT_S)
