"""Which errors mean that the database is away."""

import sqlite3

import pytest
from asyncpg import exceptions as postgres
from sqlalchemy import exc

from maitred.core.errors import ConfigInvalid, StoreUnavailable
from maitred.store.outage import explain_outage, is_full, is_outage


def _wrapped(error: Exception, *, lost: bool = False) -> exc.DBAPIError:
    return exc.OperationalError("SELECT 1", None, error, connection_invalidated=lost)


def _sqlite(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("no text is looked at")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(),
        TimeoutError(),
        OSError(101, "Network is unreachable"),
        exc.TimeoutError(),
        postgres.CannotConnectNowError("the database system is starting up"),
        postgres.AdminShutdownError("terminating connection"),
        postgres.ConnectionDoesNotExistError("connection was closed"),
        postgres.TooManyConnectionsError("sorry, too many clients already"),
        postgres.InvalidCatalogNameError("no such database"),
        postgres.InvalidPasswordError("wrong"),
        postgres.QueryCanceledError("statement timeout"),
        postgres.DeadlockDetectedError("deadlock"),
        postgres.DiskFullError("disk full"),
        postgres.ReadOnlySQLTransactionError("standby"),
        _sqlite(sqlite3.SQLITE_BUSY),
        _sqlite(sqlite3.SQLITE_IOERR_WRITE),
        _sqlite(sqlite3.SQLITE_FULL),
        _sqlite(sqlite3.SQLITE_CANTOPEN),
    ],
    ids=lambda error: f"{type(error).__name__}-{getattr(error, 'sqlite_errorcode', '')}",
)
def test_the_database_is_away(error: Exception) -> None:
    assert is_outage(error)
    assert is_outage(_wrapped(error))


@pytest.mark.parametrize(
    "error",
    [
        postgres.UndefinedTableError("relation does not exist"),
        postgres.UniqueViolationError("duplicate key"),
        postgres.NumericValueOutOfRangeError("too large"),
        _sqlite(sqlite3.SQLITE_ERROR),
        _sqlite(sqlite3.SQLITE_CONSTRAINT_UNIQUE),
        ValueError("not of a database at all"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_statement_is_wrong(error: Exception) -> None:
    assert not is_outage(error)
    assert not is_outage(_wrapped(error))
    # Unless the connection is gone, whatever the last error was.
    assert is_outage(_wrapped(error, lost=True))


def test_the_cause_of_what_an_adapter_raised_counts() -> None:
    adapted = exc.InterfaceError("SELECT 1", None, RuntimeError("adapted"))
    assert not is_outage(adapted)
    assert adapted.orig is not None
    adapted.orig.__cause__ = ConnectionResetError()
    assert is_outage(adapted)


def _unavailable(cause: Exception | None, message: str = "") -> StoreUnavailable:
    error = StoreUnavailable(message)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        (OSError(5, "Input/output error"), ("Input/output error", "Repair")),
        (_wrapped(sqlite3.OperationalError("disk I/O error")), ("disk I/O error", "Repair")),
    ],
)
def test_the_operator_hears_what_is_wrong_with_the_store(cause: Exception, says: tuple[str, str]) -> None:
    message = explain_outage(_unavailable(cause))
    assert all(words in message for words in says)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (_wrapped(_sqlite(sqlite3.SQLITE_FULL)), True),
        (OSError(28, "No space left on device"), True),
        (_wrapped(postgres.DiskFullError("could not extend file")), True),
        (_wrapped(_sqlite(sqlite3.SQLITE_IOERR)), False),
        (OSError(5, "Input/output error"), False),
        (TimeoutError(), False),
        (None, False),
    ],
)
def test_a_full_disk_is_told_from_other_outages(error: Exception | None, expected: bool) -> None:
    assert is_full(error) is expected


def test_a_message_that_says_more_is_kept() -> None:
    assert explain_outage(_unavailable(OSError(28, "x"), "The journal is full.")) == "The journal is full."
    assert explain_outage(ConfigInvalid("Wrong.")) == "Wrong."
    assert explain_outage(_unavailable(None)) == StoreUnavailable.default_message
