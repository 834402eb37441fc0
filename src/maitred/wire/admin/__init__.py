"""The bodies, queries and answers of the administration's API."""
