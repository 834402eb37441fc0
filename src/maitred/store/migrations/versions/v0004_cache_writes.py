"""Tokens that a server wrote into its prefix cache, which can have a price of their own."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Adds the column `usage.cache_write_tokens`."""
    op.add_column("usage", sa.Column("cache_write_tokens", sa.BigInteger, nullable=False, server_default="0"))
