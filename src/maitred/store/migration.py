"""Schema migration: brings a database to the tables of this version, one process at a time.

A new database gets the tables of the schema in one step, and any other the revisions that it lacks. Both give the same
tables; a test compares them. The step spares a new database the import of Alembic and most of its statements.

The whole upgrade is one transaction, so that a revision that fails, or a process that dies, leaves the database as it
was. If two gateways open the same database at once, one waits: on PostgreSQL for an advisory lock that ends with the
transaction, on SQLite for its single writer lock.
"""

from pathlib import Path

from sqlalchemy import Column, MetaData, PrimaryKeyConstraint, String, Table, insert, inspect, text
from sqlalchemy.engine import Connection

from maitred.core.errors import ConfigInvalid
from maitred.store.schema import directory_version, metadata

_ADVISORY_LOCK = int.from_bytes(b"maitred", "big")
"""Key of the advisory lock that openers wait for; a number that other programs do not use."""

_alembic_version = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
"""Table in which Alembic keeps the current revision, as Alembic makes it."""


def migrate(connection: Connection) -> None:
    """Makes the tables of a new database, or runs the missing revisions of any other.

    The connection must be in a transaction that may write.

    Raises:
        ConfigInvalid: The database was made by a newer version.
    """
    if connection.dialect.name == "postgresql":
        # A revision may take longer than the timeout of a request, and so may the process that holds the lock.
        connection.execute(text("SET LOCAL statement_timeout = 0"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:name)"), {"name": _ADVISORY_LOCK})
    if not inspect(connection).has_table(_alembic_version.name):
        _create(connection)
        return
    current = set(connection.scalars(text("SELECT version_num FROM alembic_version")))
    if current != {latest_revision()}:
        upgrade(connection, current)


def latest_revision() -> str:
    """Returns the latest revision; the files of revisions are named by their numbers."""
    return max(file.stem[1:5] for file in (Path(__file__).parent / "migrations" / "versions").glob("v*.py"))


def _create(connection: Connection) -> None:
    """Makes all tables, with the rows that revisions insert."""
    metadata.create_all(connection, checkfirst=False)
    connection.execute(insert(directory_version).values(id=1, version=0))
    _alembic_version.create(connection, checkfirst=False)
    connection.execute(insert(_alembic_version).values(version_num=latest_revision()))


def upgrade(connection: Connection, current: set[str]) -> None:
    """Runs the revisions that come after the current ones.

    Args:
        connection: Connection in a transaction that may write.
        current: The current revisions of the database; an empty set stands for a new one.

    Raises:
        ConfigInvalid: The database was made by a newer version.
    """
    # Alembic is imported only for a database of an earlier version, because its import takes longer than opening the
    # database.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if unknown := current - known:
        raise ConfigInvalid(
            f"The database has the tables of a newer version of maitred (step {min(unknown)}). Run that version, or "
            "name another database in store.url or store.folder."
        )
    command.upgrade(config, "head")
