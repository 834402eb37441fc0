"""Alembic revisions, one module each. A released revision is never changed; a new one follows it."""
