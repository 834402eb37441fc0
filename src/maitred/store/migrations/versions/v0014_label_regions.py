"""Regions where the questions of a label may be read, so that no encoder elsewhere learns from them."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Adds the column `regions` to `semantic_labels`."""
    op.add_column("semantic_labels", sa.Column("regions", sa.JSON))
