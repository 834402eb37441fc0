"""How the tables come to be, step by step; Alembic runs what is missing when a database is opened."""
