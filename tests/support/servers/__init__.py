"""Servers of others that tests start: databases, metrics, traces, identity."""
