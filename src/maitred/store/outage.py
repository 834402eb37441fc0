"""Classification of database errors: those that mean that the database is away, and those of a wrong statement."""

import sqlite3

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft

_SQLSTATE_PREFIXES = (
    "08",  # The connection broke, or was never made.
    "25006",  # Read-only: a standby that has not taken over yet.
    "28",  # It does not let us in.
    "3D",  # There is no such database.
    "40",  # Two transactions were in each other's way; the same one may succeed now.
    "53",  # Too many connections, or no room on the disk.
    "55P03",  # A lock was not to be had in time.
    "57",  # It is starting or stopping, or has cancelled what took too long.
    "58",  # Its files cannot be read.
)
"""Prefixes of the SQLSTATE codes of PostgreSQL that mean an outage."""

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
    """Whether the error means that the database is away; otherwise the statement is wrong, which is our fault.

    Args:
        error: An error of SQLAlchemy or of the driver, or a timeout.
    """
    if isinstance(error, OSError | NoConnectionLeft):  # Among them TimeoutError, and a refused connection.
        return True
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or (error.orig is not None and is_outage(error.orig))
    sqlstate = getattr(error, "sqlstate", None)
    if isinstance(sqlstate, str):
        return sqlstate.startswith(_SQLSTATE_PREFIXES)
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(code, int):
        return code & 0xFF in _SQLITE_CODES
    # What an adapter raised for the driver says nothing by itself; its cause does.
    return error.__cause__ is not None and is_outage(error.__cause__)


def first_line(error: BaseException) -> str:
    """Returns the message of a database, its driver or the system for people, without the SQL around it."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        return first_line(error.orig)
    if isinstance(error, OSError) and error.strerror and error.filename is None:
        return error.strerror
    return str(error).strip().partition("\n")[0].rstrip(".") or "it does not answer"
