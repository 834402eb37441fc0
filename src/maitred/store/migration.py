"""Brings a database up to the tables of this version, one opener at a time.

All of it is one transaction, so that a step that fails, or a process that dies, leaves the database as it was. Two
gateways that open the same database at once queue: on PostgreSQL for an advisory lock that ends with the transaction,
on SQLite for its one writer.
"""

from pathlib import Path

from sqlalchemy import inspect, text
from sqlalchemy.engine import Connection

from maitred.core.errors import ConfigInvalid

_ADVISORY_LOCK = int.from_bytes(b"maitred", "big")
"""The name that openers queue under; any number that other programs do not use."""


def migrate(connection: Connection) -> None:
    """Runs the steps that are missing. The connection is in a transaction that may write.

    Raises:
        ConfigInvalid: The database was made by a newer version.
    """
    if connection.dialect.name == "postgresql":
        # A step may take longer than a request's share of time, and so may the opener that is ahead of us.
        connection.execute(text("SET LOCAL statement_timeout = 0"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:name)"), {"name": _ADVISORY_LOCK})
    present = _present(connection)
    if present != {newest_step()}:
        run_missing(connection, present)


def newest_step() -> str:
    """The one that makes the tables of this version; files of steps are called by their numbers."""
    return max(file.stem[1:5] for file in (Path(__file__).parent / "migrations" / "versions").glob("v*.py"))


def _present(connection: Connection) -> set[str]:
    """The last steps that this database has seen; none if it is new."""
    if not inspect(connection).has_table("alembic_version"):
        return set()
    return set(connection.scalars(text("SELECT version_num FROM alembic_version")))


def run_missing(connection: Connection, present: set[str]) -> None:
    """Runs the steps that come after those that are there.

    Args:
        connection: In a transaction that may write.
        present: The last steps that the database has seen.

    Raises:
        ConfigInvalid: The database was made by a newer version.
    """
    # Only a database with other tables needs Alembic: its import takes longer than opening the database.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    known = {step.revision for step in ScriptDirectory.from_config(config).walk_revisions()}
    if unknown := present - known:
        raise ConfigInvalid(
            f"The database has the tables of a newer version of maitred (step {min(unknown)}). Run that version, or "
            "name another database in store.url or store.folder."
        )
    command.upgrade(config, "head")
