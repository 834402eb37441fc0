"""Leases of scalers, and their decisions."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Adds the tables `scaler_leases` and `scaling_decisions`."""
    op.create_table(
        "scaler_leases",
        sa.Column("pool", sa.Text),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("renewals", sa.BigInteger, nullable=False),
        sa.Column("desired", sa.Integer),
        sa.Column("asleep", sa.Integer, nullable=False),
        sa.Column("override_replicas", sa.Integer),
        sa.Column("override_until_s", sa.Double),
        sa.Column("updated_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("pool", name="pk_scaler_leases"),
    )
    op.create_table(
        "scaling_decisions",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite")),
        sa.Column("pool", sa.Text, nullable=False),
        sa.Column("at_s", sa.Double, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("decision", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_scaling_decisions"),
    )
    op.create_index("ix_scaling_decisions_pool", "scaling_decisions", ["pool"])
