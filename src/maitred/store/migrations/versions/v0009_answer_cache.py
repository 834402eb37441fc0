"""Usage of requests whose answers come from a cache, and what keys may say about them.

Lines of earlier versions have the defaults: their answers were computed. A gateway of an earlier version may still
write beside this one; its lines have the defaults as well.
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Adds the columns `usage.cache`, `usage.saved_tokens` and `keys.cache_controls`.

    The defaults stand in the database, so that no line has to be rewritten.
    """
    op.add_column("usage", sa.Column("cache", sa.String(20), nullable=False, server_default=""))
    op.add_column("usage", sa.Column("saved_tokens", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("keys", sa.Column("cache_controls", sa.JSON(none_as_null=True)))
