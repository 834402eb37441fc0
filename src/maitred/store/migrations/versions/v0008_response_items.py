"""Ids of items that servers of the Responses API have given, by which a later request names them."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Adds the table `response_items`."""
    object_id = sa.String(63).with_variant(sa.String(63, collation="C"), "postgresql")
    op.create_table(
        "response_items",
        sa.Column("item", object_id),
        sa.Column("response", object_id),
        sa.PrimaryKeyConstraint("item", "response", name="pk_response_items"),
        sa.ForeignKeyConstraint(["response"], ["responses.id"], name="fk_response_items_response", ondelete="CASCADE"),
    )
    op.create_index("ix_response_items_response", "response_items", ["response"])
