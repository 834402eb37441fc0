"""Shared types of every package: ids, requests, usage, clock, errors, Protocols. It imports no other package."""
