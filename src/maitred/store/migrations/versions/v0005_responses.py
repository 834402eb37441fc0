"""Tables of stored responses and conversations."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Adds the tables `responses`, `conversations` and `conversation_items`."""
    object_id = sa.String(63).with_variant(sa.String(63, collation="C"), "postgresql")
    op.create_table(
        "responses",
        sa.Column("id", object_id),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("organisation", sa.Text, nullable=False),
        sa.Column("previous", object_id),
        sa.Column("conversation", object_id),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("expires_s", sa.Double, nullable=False),
        sa.Column("input", sa.LargeBinary, nullable=False),
        sa.Column("output", sa.LargeBinary, nullable=False),
        sa.Column("resource", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_responses"),
    )
    op.create_index("ix_responses_expires_s", "responses", ["expires_s"])
    op.create_table(
        "conversations",
        sa.Column("id", object_id),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("organisation", sa.Text, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("expires_s", sa.Double, nullable=False),
        sa.Column("metadata", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_conversations"),
    )
    op.create_index("ix_conversations_expires_s", "conversations", ["expires_s"])
    op.create_table(
        "conversation_items",
        sa.Column("conversation", object_id),
        sa.Column("position", sa.BigInteger),
        sa.Column("id", object_id, nullable=False),
        sa.Column("item", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("conversation", "position", name="pk_conversation_items"),
        sa.ForeignKeyConstraint(
            ["conversation"],
            ["conversations.id"],
            name="fk_conversation_items_conversation",
            ondelete="CASCADE",
        ),
    )
