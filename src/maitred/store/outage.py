"""Classification of database errors: an unreachable database, or a wrong statement."""

import errno
import sqlite3

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft

from maitred.core.errors import MaitredError, StoreUnavailable

_SQLSTATE_PREFIXES = (
    "08",  # The connection broke, or was never made.
    "25006",  # The server is read-only: a standby that is not yet the primary.
    "28",  # The server rejects the login.
    "3D",  # The database does not exist.
    "40",  # Two transactions conflicted; the same transaction may succeed now.
    "53",  # There are too many connections, or the disk is full.
    "55P03",  # A lock could not be acquired in time.
    "57",  # The server is starting or stopping, or has cancelled a statement that took too long.
    "58",  # The server cannot read its files.
)
"""Prefixes of the SQLSTATE codes of PostgreSQL that mean an outage."""

_SQLSTATE_DISK_FULL = "53100"
_SQLITE_CODES = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_READONLY,
    }
)


def is_outage(error: BaseException) -> bool:
    """Whether the error means an outage of the database; otherwise our statement is wrong.

    Args:
        error: An error of SQLAlchemy or of the driver, or a timeout.
    """
    if isinstance(error, OSError | NoConnectionLeft):  # OSError includes TimeoutError and refused connections.
        return True
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or (error.orig is not None and is_outage(error.orig))
    sqlstate = getattr(error, "sqlstate", None)
    if isinstance(sqlstate, str):
        return sqlstate.startswith(_SQLSTATE_PREFIXES)
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(code, int):
        return code & 0xFF in _SQLITE_CODES
    # An exception that an adapter raised for the driver has no information itself; its cause has it.
    return error.__cause__ is not None and is_outage(error.__cause__)


def is_full(error: BaseException | None) -> bool:
    """Whether the error means that the disk of the database is full."""
    if error is None:
        return False
    if isinstance(error, DBAPIError):
        return is_full(error.orig)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    if getattr(error, "sqlstate", None) == _SQLSTATE_DISK_FULL:
        return True
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(code, int):
        return code & 0xFF == sqlite3.SQLITE_FULL
    return is_full(error.__cause__)


def explain_outage(error: MaitredError) -> str:
    """Returns the message of an error for the operator: of an outage of the store, with its cause.

    The message for callers says nothing about the store.
    """
    cause = error.__cause__
    if not isinstance(error, StoreUnavailable) or cause is None or error.message != error.default_message:
        return error.message
    return f"The store cannot be used: {first_line(cause)}. Repair it, or restore a backup of it, and start again."


def first_line(error: BaseException) -> str:
    """Returns the message of a database, driver or system as readable text, without the SQL."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        return first_line(error.orig)
    if isinstance(error, OSError) and error.strerror and error.filename is None:
        return error.strerror
    return str(error).strip().partition("\n")[0].rstrip(".") or "it does not answer"
