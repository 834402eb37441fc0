"""Responses that run in the background: which gateway runs one, until when it has claimed it, and who cancels it.

A gateway of an earlier version may still write beside this one; its responses have ended, as the defaults say.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Adds four columns to `responses`, and an index of those that run."""
    object_id = sa.String(63).with_variant(sa.String(63, collation="C"), "postgresql")
    op.add_column("responses", sa.Column("last_event", sa.BigInteger))
    op.add_column("responses", sa.Column("owner", object_id))
    op.add_column("responses", sa.Column("claimed_until_s", sa.Double))
    op.add_column("responses", sa.Column("cancelled", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_index(
        "ix_responses_running",
        "responses",
        ["claimed_until_s"],
        sqlite_where=sa.text("owner IS NOT NULL"),
        postgresql_where=sa.text("owner IS NOT NULL"),
    )
