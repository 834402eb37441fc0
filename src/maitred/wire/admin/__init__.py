"""Bodies, queries and responses of the admin API."""
