"""Database schema: tenants, keys, limits, usage and spend.

Tenants, keys and limits form the *directory*. Each change of the directory takes the next number from the single row of
`directory_version`, whose lock is held until the change is committed, and marks the changed rows with that number.
Numbers therefore become visible in ascending order, and a reader of all rows newer than a number gets every change. A
deleted row stays as a tombstone, so that readers see its deletion and its id is never used again.

`rollouts` has the decisions on new versions of models.

`usage` is append-only; `spend` is its running sum per budget counter, written in the same transaction, and `feedback`
has the opinions of callers on its entries. `response_items` finds a response by the id of an item that its server has
given; ids of this gateway lead to their response by themselves. `responses`, `conversations` and
`conversation_items` have what later requests go on with; a row of `responses` that has an owner is one that still runs.
`signing_key` has the key with which gateways sign what their clients keep for them.

`semantic_scopes` has the state of each scope of the semantic cache for each encoder, `semantic_labels` the questions of
users whose answers were compared, and `semantic_verifiers` what was learnt from them. Weights have a table of their own
because the state beside them is written every second.

`scaler_leases` says which gateway decides on the number of a pool's replicas, and how many there should be;
`scaling_decisions` has its last decisions with their evidence. In `scaling_demands`, gateways that share a pool tell
each other their demand.

A new database is made from these tables. The migrations in `maitred.store.migrations` make them, too, from those of
earlier versions; a test compares the two.
"""

from typing import Any

from msgspec import Struct
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    false,
    or_,
    text,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator, TypeEngine

from maitred.core.tenancy import Principal


class StoredText(TypeDecorator[str]):
    """Column type for text from clients, which stores any text.

    PostgreSQL accepts neither a zero character nor half a surrogate pair, and one such ledger entry would block a whole
    batch of usage; this type replaces them by U+FFFD.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Returns the text as it is written to the database."""
        if value is None or value.isprintable():
            return value
        return value.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _id_type() -> TypeEngine[str]:
    # Ids are compared byte by byte on both databases, so that pages have the same order for every language setting of
    # the server.
    return String(63).with_variant(String(63, collation="C"), "postgresql")


def _scope_type() -> TypeEngine[str]:
    return Text().with_variant(Text(collation="C"), "postgresql")  # for the same reason


def _of_scope() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(
        ["scope", "encoder"], ["semantic_scopes.scope", "semantic_scopes.encoder"], ondelete="CASCADE"
    )


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

directory_version = Table(
    "directory_version",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
    CheckConstraint("id = 1", name="one_row"),
)

tenants = Table(
    "tenants",
    metadata,
    Column("id", _id_type(), primary_key=True),
    Column("parent", _id_type(), ForeignKey("tenants.id"), index=True),
    Column("name", Text, nullable=False),
    Column("weight", Double, nullable=False),
    Column("models", JSON(none_as_null=True)),
    Column("priority_ceiling", Integer),
    Column("regions", JSON, nullable=False),
    Column("tags", JSON, nullable=False),
    Column("disabled", Boolean, nullable=False),
    Column("deleted", Boolean, nullable=False),
    Column("version", BigInteger, nullable=False, index=True),
)

keys = Table(
    "keys",
    metadata,
    Column("id", _id_type(), primary_key=True),
    Column("tenant", _id_type(), ForeignKey("tenants.id"), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("expires_s", Double),
    Column("revoked", Boolean, nullable=False),
    Column("deleted", Boolean, nullable=False),
    Column("version", BigInteger, nullable=False, index=True),
    # Null: what the configuration allows.
    Column("cache_controls", JSON(none_as_null=True)),
)

key_secrets = Table(
    "key_secrets",
    metadata,
    Column("key", _id_type(), ForeignKey("keys.id"), primary_key=True),
    Column("sha256", LargeBinary(32), primary_key=True),
    # This is the version that added the secret: the newest secret has the highest version.
    Column("made", BigInteger, nullable=False),
    Column("expires_s", Double),
)

limits = Table(
    "limits",
    metadata,
    Column("id", _id_type(), primary_key=True),
    Column("subject", Text, nullable=False),
    Column("kind", String(40), nullable=False),
    # An empty text means all models together. The column is not NULL, because NULLs would not count as equal in the
    # index below.
    Column("model", Text, nullable=False),
    Column("value", BigInteger, nullable=False),
    Column("burst", BigInteger),
    Column("hard", Boolean, nullable=False),
    Column("deleted", Boolean, nullable=False),
    # This is the version that added the limit: the limits of a subject are listed in the order in which they were made.
    Column("made", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False, index=True),
)
Index(
    "ix_limits_one_per_subject_model_kind",
    limits.c.subject,
    limits.c.model,
    limits.c.kind,
    limits.c.hard,
    unique=True,
    sqlite_where=text("NOT deleted"),
    postgresql_where=text("NOT deleted"),
)

# This table has the entries that the configuration declared at the last start, so that entries that are no longer
# declared differ from entries that were made through the API.
declarations = Table(
    "declarations",
    metadata,
    Column("sort", String(10), primary_key=True),
    Column("id", _id_type(), primary_key=True),
)

admin_replies = Table(
    "admin_replies",
    metadata,
    Column("key", Text, primary_key=True),
    Column("body_hash", LargeBinary, nullable=False),
    Column("status", Integer, nullable=False),
    Column("reply", LargeBinary, nullable=False),
    Column("time_s", Double, nullable=False, index=True),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("name", Text, primary_key=True),
    Column("settings", JSON, nullable=False),
    # Declaration in the configuration at the last start; null: the rollout was made through the API.
    Column("declared", JSON(none_as_null=True)),
    Column("phase", String(20), nullable=False),
    Column("weight", Double, nullable=False),
    Column("shadow", Double, nullable=False),
    Column("trial", BigInteger, nullable=False),
    Column("why", Text, nullable=False),
    Column("changed_s", Double, nullable=False),
)

usage = Table(
    "usage",
    metadata,
    Column("id", StoredText, primary_key=True),
    Column("request_id", StoredText, nullable=False, index=True),
    Column("time_s", Double, nullable=False, index=True),
    Column("key", StoredText, nullable=False),
    Column("tenant", StoredText, nullable=False),
    Column("organisation", StoredText, nullable=False),
    Column("model", StoredText, nullable=False),
    Column("replica", StoredText, nullable=False),
    Column("route", StoredText, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("price", StoredText, nullable=False),
    Column("cost_nusd", BigInteger, nullable=False),
    Column("ttft_s", Double),
    Column("duration_s", Double, nullable=False),
    Column("outcome", String(20), nullable=False),
    Column("charges", JSON, nullable=False),
    Column("taken", JSON, nullable=False),
    Column("rollout", StoredText, nullable=False, server_default=""),
    Column("cache_write_tokens", BigInteger, nullable=False, server_default="0"),
    Column("cache", String(20), nullable=False, server_default=""),
    Column("saved_tokens", BigInteger, nullable=False, server_default="0"),
    Index(None, "tenant", "time_s"),
    Index(None, "key", "time_s"),
)

# When an operator deletes old lines of usage by hand, their feedback is deleted too.
feedback = Table(
    "feedback",
    metadata,
    Column("usage", StoredText, ForeignKey("usage.id", ondelete="CASCADE"), primary_key=True),
    Column("score", Double, nullable=False),
    Column("text", StoredText, nullable=False),
    Column("tags", JSON, nullable=False),
    Column("key", StoredText, nullable=False),
    Column("time_s", Double, nullable=False),
)

responses = Table(
    "responses",
    metadata,
    Column("id", _id_type(), primary_key=True),
    Column("tenant", StoredText, nullable=False),
    Column("organisation", StoredText, nullable=False),
    # There is no foreign key: a response may be deleted while later ones of its conversation stay.
    Column("previous", _id_type()),
    Column("conversation", _id_type()),
    Column("created_s", Double, nullable=False),
    Column("expires_s", Double, nullable=False, index=True),
    Column("input", LargeBinary, nullable=False),
    Column("output", LargeBinary, nullable=False),
    Column("resource", LargeBinary, nullable=False),
    Column("last_event", BigInteger),
    # The next three columns are for responses that run in the background: the gateway that runs it, the time until
    # which it has claimed it, and whether another gateway asks it to cancel it. An ended response has no owner.
    Column("owner", _id_type()),
    Column("claimed_until_s", Double),
    Column("cancelled", Boolean, nullable=False, server_default=false()),
)
Index(
    "ix_responses_running",
    responses.c.claimed_until_s,
    sqlite_where=text("owner IS NOT NULL"),
    postgresql_where=text("owner IS NOT NULL"),
)

response_items = Table(
    "response_items",
    metadata,
    Column("item", _id_type(), primary_key=True),
    Column("response", _id_type(), ForeignKey("responses.id", ondelete="CASCADE"), primary_key=True, index=True),
)

conversations = Table(
    "conversations",
    metadata,
    Column("id", _id_type(), primary_key=True),
    Column("tenant", StoredText, nullable=False),
    Column("organisation", StoredText, nullable=False),
    Column("created_s", Double, nullable=False),
    Column("expires_s", Double, nullable=False, index=True),
    Column("metadata", JSON, nullable=False),
)

conversation_items = Table(
    "conversation_items",
    metadata,
    Column("conversation", _id_type(), ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True),
    Column("position", BigInteger, primary_key=True),
    Column("id", _id_type(), nullable=False),
    Column("item", LargeBinary, nullable=False),
)

signing_key = Table(
    "signing_key",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("key", LargeBinary, nullable=False),
    CheckConstraint("id = 1", name="ck_signing_key_one_row"),  # its revision named it so, with the prefix
)

semantic_scopes = Table(
    "semantic_scopes",
    metadata,
    Column("scope", _scope_type(), primary_key=True),
    Column("encoder", _scope_type(), primary_key=True),
    Column("model", Text, nullable=False),
    # Empty: all callers share the scope.
    Column("tenant", Text, nullable=False),
    Column("organisation", Text, nullable=False),
    Column("record", LargeBinary, nullable=False),
    Column("updated_s", Double, nullable=False, index=True),
)

semantic_labels = Table(
    "semantic_labels",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("scope", _scope_type(), nullable=False),
    Column("encoder", _scope_type(), nullable=False),
    Column("created_s", Double, nullable=False),
    Column("asked", StoredText, nullable=False),
    Column("cached", StoredText, nullable=False),
    Column("same", Boolean, nullable=False),
    Column("surroundings", JSON, nullable=False),
    Column("regions", JSON),
    _of_scope(),
    Index(None, "scope", "encoder"),
)

semantic_verifiers = Table(
    "semantic_verifiers",
    metadata,
    Column("scope", _scope_type(), primary_key=True),
    Column("encoder", _scope_type(), primary_key=True),
    Column("version", Text, nullable=False),
    Column("weights", LargeBinary, nullable=False),
    _of_scope(),
)

scaler_leases = Table(
    "scaler_leases",
    metadata,
    Column("pool", Text, primary_key=True),
    # Empty: nobody has decided yet.
    Column("owner", Text, nullable=False),
    # It grows with each new owner.
    Column("epoch", BigInteger, nullable=False),
    Column("renewals", BigInteger, nullable=False),
    Column("desired", Integer),
    Column("asleep", Integer, nullable=False),
    Column("override_replicas", Integer),
    Column("override_until_s", Double),
    Column("updated_s", Double, nullable=False),
)

scaling_decisions = Table(
    "scaling_decisions",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("pool", Text, nullable=False, index=True),
    Column("at_s", Double, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("decision", LargeBinary, nullable=False),
)

scaling_demands = Table(
    "scaling_demands",
    metadata,
    Column("pool", Text, primary_key=True),
    # Name of the process.
    Column("gateway", Text, primary_key=True),
    # It grows with each write.
    Column("sequence", BigInteger, nullable=False),
    Column("demand", LargeBinary, nullable=False),
)

spend = Table(
    "spend",
    metadata,
    Column("counter", StoredText, primary_key=True),
    Column("charged_nusd", BigInteger, nullable=False),
)


def row_of(table: Table, value: Struct) -> dict[str, Any]:
    """Returns the fields of a struct that the table has columns for."""
    return {name: getattr(value, name) for name in value.__struct_fields__ if name in table.c}


def owned_by(table: Table, principal: Principal) -> ColumnElement[bool]:
    """Returns the condition that a row belongs to the caller's tenant, or to a team of it."""
    own_tenant = principal.tenants[0]
    return or_(table.c.tenant == own_tenant, table.c.organisation == own_tenant)
