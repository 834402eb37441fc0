"""Migrations of the tables, revision by revision; Alembic runs the missing ones when a database is opened."""
