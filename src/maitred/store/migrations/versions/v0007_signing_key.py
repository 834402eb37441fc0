"""Key with which all gateways on a database sign what their clients keep for them; the first that needs it draws it."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Adds the table `signing_key`."""
    op.create_table(
        "signing_key",
        sa.Column("id", sa.Integer, autoincrement=False),
        sa.Column("key", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_signing_key"),
        sa.CheckConstraint("id = 1", name="ck_signing_key_one_row"),
    )
