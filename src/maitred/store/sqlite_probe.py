"""Looks at SQLite without waiting for anything: for what is asked several times a second and has hardly ever changed.

A transaction wakes SQLite's thread and is woken by it for each of its steps, which costs a hundred times what reading
one number does. A look has a connection of its own and is done at once, on the event loop: the number is in memory
unless somebody has written, a write-ahead log lets nobody wait for a writer, and where anything else is in the way it
gives up, and whoever looks takes the long way. The journal, in a folder beside it, is written at once as well.
"""

import sqlite3
from pathlib import Path


class SqliteChangeProbe:
    """Of one file. Belongs to one thread.

    Args:
        file: The database.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._connection: sqlite3.Connection | None = None
        self._connections = 0

    def at(self, query: str) -> int | None:
        """The number that a query gives; None: it cannot be told without waiting."""
        try:
            if self._connection is None:
                address = f"{self._file.absolute().as_uri()}?mode=rw"  # a file that is not there is not made
                self._connection = sqlite3.connect(address, timeout=0.0, isolation_level=None, uri=True)
                self._connections += 1
            return int(self._connection.execute(query).fetchone()[0])
        except sqlite3.Error:
            self.close()
            return None

    def mark(self) -> tuple[int, int] | None:
        """Another one when anybody has committed anything since; None: it cannot be told without waiting."""
        # The number is the connection's own, and one that is made anew may come to the same.
        version = self.at("PRAGMA data_version")
        return None if version is None else (self._connections, version)

    def close(self) -> None:
        """Lets go of the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
