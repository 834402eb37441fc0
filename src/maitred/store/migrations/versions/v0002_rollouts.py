"""Table of rollouts, and a column for the rollout arm of a ledger entry."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Adds the table `rollouts` and the column `usage.rollout`."""
    op.create_table(
        "rollouts",
        sa.Column("name", sa.Text),
        sa.Column("settings", sa.JSON, nullable=False),
        sa.Column("declared", sa.JSON),
        sa.Column("phase", sa.String(20), nullable=False),
        sa.Column("weight", sa.Double, nullable=False),
        sa.Column("shadow", sa.Double, nullable=False),
        sa.Column("trial", sa.BigInteger, nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("changed_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_rollouts"),
    )
    op.add_column("usage", sa.Column("rollout", sa.Text, nullable=False, server_default=""))
