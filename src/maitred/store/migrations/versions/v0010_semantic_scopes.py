"""Scopes of the semantic cache: their state, the labels that verifiers learn from, and verifiers."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Adds the tables `semantic_scopes`, `semantic_labels` and `semantic_verifiers`."""
    scope_name = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    op.create_table(
        "semantic_scopes",
        sa.Column("scope", scope_name),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("organisation", sa.Text, nullable=False),
        sa.Column("encoder", sa.Text, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
        sa.Column("updated_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("scope", name="pk_semantic_scopes"),
    )
    op.create_index("ix_semantic_scopes_updated_s", "semantic_scopes", ["updated_s"])
    op.create_table(
        "semantic_labels",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite")),
        sa.Column("scope", scope_name, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("asked", sa.Text, nullable=False),
        sa.Column("cached", sa.Text, nullable=False),
        sa.Column("same", sa.Boolean, nullable=False),
        sa.Column("surroundings", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_semantic_labels"),
        sa.ForeignKeyConstraint(
            ["scope"], ["semantic_scopes.scope"], name="fk_semantic_labels_scope", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_semantic_labels_scope", "semantic_labels", ["scope"])
    op.create_table(
        "semantic_verifiers",
        sa.Column("scope", scope_name),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("weights", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("scope", name="pk_semantic_verifiers"),
        sa.ForeignKeyConstraint(
            ["scope"], ["semantic_scopes.scope"], name="fk_semantic_verifiers_scope", ondelete="CASCADE"
        ),
    )
