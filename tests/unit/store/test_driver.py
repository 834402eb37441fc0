"""What can be read of an SQLite file without waiting."""

import sqlite3

import pytest

from maitred.store.driver import SqliteChangeProbe

COUNT = "SELECT count(*) FROM things"


@pytest.fixture
def writer(tmp_path):
    connection = sqlite3.connect(tmp_path / "a file.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE things (id)")
    yield connection
    connection.close()


@pytest.fixture
def glance(tmp_path, writer):
    glance = SqliteChangeProbe(tmp_path / "a file.db")
    yield glance
    glance.close()


def test_it_sees_what_is_committed_and_nothing_else(writer, glance):
    mark = glance.change_token()
    assert (glance.read(COUNT), glance.change_token()) == (0, mark)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("INSERT INTO things VALUES (1)")
    assert (glance.read(COUNT), glance.change_token()) == (0, mark)
    writer.execute("COMMIT")
    assert glance.read(COUNT) == 1
    assert glance.change_token() not in (None, mark)


def test_it_does_not_wait_for_locks_of_others(writer, glance):
    assert glance.read("SELECT count(*) FROM nothing") is None
    writer.execute("PRAGMA journal_mode = DELETE")
    writer.execute("BEGIN EXCLUSIVE")
    assert glance.read(COUNT) is None
    assert glance.change_token() is None
    writer.execute("COMMIT")
    assert glance.read(COUNT) == 0


def test_a_mark_is_never_had_twice(writer, glance):
    marks = set()
    for _ in range(5):
        marks.add(glance.change_token())
        glance.close()
    assert len(marks) == 5


def test_a_file_that_is_not_there_is_not_made(tmp_path):
    assert SqliteChangeProbe(tmp_path / "none.db").change_token() is None
    assert not (tmp_path / "none.db").exists()
