"""Implementations of the admin API's services, by subject."""
