"""The steps from any earlier tables to those of this version, run by Alembic.

Nothing of it is imported where the tables are as they should be: that would take longer than opening the database.
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection

from maitred.core.errors import ConfigInvalid


def run_missing(connection: Connection, present: set[str]) -> None:
    """Runs the steps that come after those that are there.

    Args:
        connection: In a transaction that may write.
        present: The last steps that the database has seen.

    Raises:
        ConfigInvalid: The database was made by a newer version.
    """
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
