"""Errors for a database that cannot be used, and for one that disappears while a gateway uses it."""

from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import text

import maitred.store
from maitred.core.errors import ConfigInvalid, StoreUnavailable
from maitred.core.secret import Secret
from maitred.identity.directory import Directory
from maitred.identity.identity import DirectoryRefresher
from maitred.store.config import StoreConfig
from maitred.store.database import open_database
from maitred.store.directory import DirectoryStore
from maitred.store.migration import latest_revision
from tests.support.clock import FakeClock


async def refusal_of(config):
    with pytest.raises(StoreUnavailable) as refused:
        async with open_database(config):
            pass
    return refused.value.message


async def test_a_file_that_is_no_database_is_named_with_what_is_wrong_and_what_helps(tmp_path):
    (tmp_path / "maitred.db").write_bytes(b"garbage" * 5000)
    message = await refusal_of(StoreConfig(folder=str(tmp_path)))
    assert str(tmp_path / "maitred.db") in message
    assert "not a database" in message
    assert "store.folder" in message


async def test_a_server_that_does_not_answer_is_named_without_its_password(tmp_path):
    url = Secret("postgresql://maitred:hunter2@127.0.0.1:1/accounts", "{env: URL}")
    message = await refusal_of(StoreConfig(folder=str(tmp_path), url=url))
    assert "127.0.0.1:1/accounts" in message
    assert "hunter2" not in message


async def test_a_file_that_is_taken_away_is_missed_and_is_good_again_when_it_is_back(tmp_path):
    folder, aside = tmp_path / "data", tmp_path / "aside"
    aside.mkdir()
    async with open_database(StoreConfig(folder=str(folder))) as database:
        refresher = DirectoryRefresher(DirectoryStore(database, FakeClock()), Directory(), FakeClock())
        await refresher.load()
        for file in folder.glob("maitred.db*"):
            file.rename(aside / file.name)
        # SQLite itself would go on with a file that nobody will ever find again.
        with pytest.raises(StoreUnavailable) as refused:
            await refresher.load()
        assert refresher.away
        assert "not the file that was opened" in str(refused.value.__cause__)
        assert not (folder / "maitred.db").exists(), "it must not be made anew, empty"
        for file in aside.iterdir():
            file.rename(folder / file.name)
        await refresher.load()
        assert not refresher.away


async def test_another_file_in_the_place_of_the_first_is_not_taken_for_it(tmp_path):
    folder = tmp_path / "data"
    async with open_database(StoreConfig(folder=str(folder))) as database:
        (folder / "maitred.db").rename(tmp_path / "old.db")
        (folder / "maitred.db").write_bytes(b"")
        with pytest.raises(StoreUnavailable):
            async with database.begin():
                pass


async def test_tables_are_made_once_and_those_of_a_newer_version_are_not_touched(tmp_path):
    config = StoreConfig(folder=str(tmp_path))
    async with open_database(config) as database, database.begin_read() as connection:
        assert await connection.scalar(text("SELECT version_num FROM alembic_version")) == latest_revision()
    async with open_database(config) as database, database.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConfigInvalid, match="newer version of maitred"):
        async with open_database(config):
            pass


def test_the_newest_step_is_known_without_alembic():
    steps = ScriptDirectory(str(Path(maitred.store.__file__).parent / "migrations"))
    assert [latest_revision()] == steps.get_heads()


@pytest.mark.parametrize("is_new", [True, False])
async def test_only_its_owner_reads_the_database_whatever_the_folder(tmp_path, is_new):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    config = StoreConfig(folder=str(folder))
    if not is_new:
        async with open_database(config):
            pass
        (folder / "maitred.db").chmod(0o644)
    async with open_database(config) as database:
        async with database.begin() as connection:
            await connection.execute(text("UPDATE directory_version SET version = version"))
        modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert {"maitred.db", "maitred.db-wal", "maitred.db-shm"} <= modes.keys()
    assert set(modes.values()) == {0o600}


async def test_a_full_database_says_so(tmp_path):
    async def fill(database):
        async with database.begin() as connection:
            pages = await connection.scalar(text("PRAGMA page_count"))
            await connection.execute(text(f"PRAGMA max_page_count = {pages}"))
            await connection.execute(text("CREATE TABLE big AS SELECT hex(randomblob(1000000)) AS it"))

    async with open_database(StoreConfig(folder=str(tmp_path))) as database:
        with pytest.raises(StoreUnavailable, match="is full"):
            await fill(database)
