"""Alembic's entry: it is executed, never imported, with the connection that `maitred.store.database` opened.

That connection already holds the lock that lets one opener migrate at a time, and is inside a transaction: a step
that fails leaves the database as it was.
"""

from alembic import context

from maitred.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,  # SQLite can, although Alembic does not count on it.
)
context.run_migrations()
