"""Tokens that a server wrote into its prefix cache, which can have a price of their own.

Lines of earlier versions say 0: these versions charged written tokens as any others. A gateway of an earlier version
may still write beside this one; its lines take the default.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Adds the column `usage.cache_write_tokens`.

    The default stands in the database, so that no line has to be rewritten.
    """
    op.add_column(
        "usage",
        sa.Column("cache_write_tokens", sa.BigInteger, nullable=False, server_default="0"),
    )
