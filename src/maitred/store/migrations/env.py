"""Entry script of Alembic, which executes it with the connection of `maitred.store.database`.

That connection already holds the lock that lets one process at a time migrate, and is inside a transaction: a revision
that fails leaves the database as it was.
"""

from alembic import context

from maitred.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,  # SQLite supports this, although Alembic assumes that it does not.
)
context.run_migrations()
