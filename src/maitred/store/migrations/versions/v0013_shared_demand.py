"""Demand that the gateways of a shared pool tell each other."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Adds the table `scaling_demands`."""
    op.create_table(
        "scaling_demands",
        sa.Column("pool", sa.Text),
        sa.Column("gateway", sa.Text),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("demand", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("pool", "gateway", name="pk_scaling_demands"),
    )
