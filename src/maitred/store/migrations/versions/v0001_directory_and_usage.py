"""Tenants, keys, limits, usage and spend."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_ID = sa.String(63).with_variant(sa.String(63, collation="C"), "postgresql")


def upgrade() -> None:
    """Creates the first tables: directory, administrative replies and usage."""
    version = op.create_table(
        "directory_version",
        sa.Column("id", sa.Integer, autoincrement=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_directory_version"),
        sa.CheckConstraint("id = 1", name="one_row"),
    )
    op.bulk_insert(version, [{"id": 1, "version": 0}])
    _create_directory()
    _create_admin_replies()
    _create_usage()


def _create_directory() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", _ID),
        sa.Column("parent", _ID),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("weight", sa.Double, nullable=False),
        sa.Column("models", sa.JSON),
        sa.Column("priority_ceiling", sa.Integer),
        sa.Column("regions", sa.JSON, nullable=False),
        sa.Column("tags", sa.JSON, nullable=False),
        sa.Column("disabled", sa.Boolean, nullable=False),
        sa.Column("deleted", sa.Boolean, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
        sa.ForeignKeyConstraint(["parent"], ["tenants.id"], name="fk_tenants_parent"),
    )
    op.create_index("ix_tenants_parent", "tenants", ["parent"])
    op.create_index("ix_tenants_version", "tenants", ["version"])
    op.create_table(
        "keys",
        sa.Column("id", _ID),
        sa.Column("tenant", _ID, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("expires_s", sa.Double),
        sa.Column("revoked", sa.Boolean, nullable=False),
        sa.Column("deleted", sa.Boolean, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name="fk_keys_tenant"),
    )
    op.create_index("ix_keys_tenant", "keys", ["tenant"])
    op.create_index("ix_keys_version", "keys", ["version"])
    op.create_table(
        "key_secrets",
        sa.Column("key", _ID),
        sa.Column("sha256", sa.LargeBinary(32)),
        sa.Column("made", sa.BigInteger, nullable=False),
        sa.Column("expires_s", sa.Double),
        sa.PrimaryKeyConstraint("key", "sha256", name="pk_key_secrets"),
        sa.ForeignKeyConstraint(["key"], ["keys.id"], name="fk_key_secrets_key"),
    )
    op.create_table(
        "limits",
        sa.Column("id", _ID),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("value", sa.BigInteger, nullable=False),
        sa.Column("burst", sa.BigInteger),
        sa.Column("hard", sa.Boolean, nullable=False),
        sa.Column("deleted", sa.Boolean, nullable=False),
        sa.Column("made", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_limits"),
    )
    op.create_index("ix_limits_version", "limits", ["version"])
    op.create_index(
        "ix_limits_one_per_subject_model_kind",
        "limits",
        ["subject", "model", "kind", "hard"],
        unique=True,
        sqlite_where=sa.text("NOT deleted"),
        postgresql_where=sa.text("NOT deleted"),
    )

    op.create_table(
        "declarations",
        sa.Column("sort", sa.String(10)),
        sa.Column("id", _ID),
        sa.PrimaryKeyConstraint("sort", "id", name="pk_declarations"),
    )


def _create_admin_replies() -> None:
    op.create_table(
        "admin_replies",
        sa.Column("key", sa.Text),
        sa.Column("body_hash", sa.LargeBinary, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("reply", sa.LargeBinary, nullable=False),
        sa.Column("time_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_admin_replies"),
    )
    op.create_index("ix_admin_replies_time_s", "admin_replies", ["time_s"])


def _create_usage() -> None:
    op.create_table(
        "usage",
        sa.Column("id", sa.Text),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("time_s", sa.Double, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("organisation", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("replica", sa.Text, nullable=False),
        sa.Column("route", sa.Text, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("price", sa.Text, nullable=False),
        sa.Column("cost_nusd", sa.BigInteger, nullable=False),
        sa.Column("ttft_s", sa.Double),
        sa.Column("duration_s", sa.Double, nullable=False),
        sa.Column("outcome", sa.String(20), nullable=False),
        sa.Column("charges", sa.JSON, nullable=False),
        sa.Column("taken", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_usage"),
    )
    op.create_index("ix_usage_request_id", "usage", ["request_id"])
    op.create_index("ix_usage_time_s", "usage", ["time_s"])
    op.create_index("ix_usage_tenant_time_s", "usage", ["tenant", "time_s"])
    op.create_index("ix_usage_key_time_s", "usage", ["key", "time_s"])
    op.create_table(
        "spend",
        sa.Column("counter", sa.Text),
        sa.Column("charged_nusd", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("counter", name="pk_spend"),
    )
