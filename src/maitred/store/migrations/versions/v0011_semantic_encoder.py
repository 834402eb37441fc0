"""State of a scope of the semantic cache by encoder, so that gateways with different ones leave each other's alone.

What is in the tables of the version before was learnt for versions of encoders that no encoder has any more, as these
count the features of verifiers now. Nothing can go on with it, and its labels are texts of users. So it is deleted.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Makes the tables `semantic_scopes`, `semantic_labels` and `semantic_verifiers` again, with the encoder as key."""
    for table in ("semantic_verifiers", "semantic_labels", "semantic_scopes"):
        op.drop_table(table)
    scope_name = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    op.create_table(
        "semantic_scopes",
        sa.Column("scope", scope_name),
        sa.Column("encoder", scope_name),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("organisation", sa.Text, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
        sa.Column("updated_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("scope", "encoder", name="pk_semantic_scopes"),
    )
    op.create_index("ix_semantic_scopes_updated_s", "semantic_scopes", ["updated_s"])
    op.create_table(
        "semantic_labels",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite")),
        sa.Column("scope", scope_name, nullable=False),
        sa.Column("encoder", scope_name, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("asked", sa.Text, nullable=False),
        sa.Column("cached", sa.Text, nullable=False),
        sa.Column("same", sa.Boolean, nullable=False),
        sa.Column("surroundings", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_semantic_labels"),
        sa.ForeignKeyConstraint(
            ["scope", "encoder"],
            ["semantic_scopes.scope", "semantic_scopes.encoder"],
            name="fk_semantic_labels_scope_encoder",
            ondelete="CASCADE",
        ),
    )
    op.create_index("ix_semantic_labels_scope_encoder", "semantic_labels", ["scope", "encoder"])
    op.create_table(
        "semantic_verifiers",
        sa.Column("scope", scope_name),
        sa.Column("encoder", scope_name),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("weights", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("scope", "encoder", name="pk_semantic_verifiers"),
        sa.ForeignKeyConstraint(
            ["scope", "encoder"],
            ["semantic_scopes.scope", "semantic_scopes.encoder"],
            name="fk_semantic_verifiers_scope_encoder",
            ondelete="CASCADE",
        ),
    )
