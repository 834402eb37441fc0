"""Benchmarks that break engines and upstream servers under load."""
