"""Table of callers' feedback on responses."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Adds the table `feedback`."""
    op.create_table(
        "feedback",
        sa.Column("usage", sa.Text),
        sa.Column("score", sa.Double, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("tags", sa.JSON, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("time_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("usage", name="pk_feedback"),
        sa.ForeignKeyConstraint(["usage"], ["usage.id"], name="fk_feedback_usage", ondelete="CASCADE"),
    )
