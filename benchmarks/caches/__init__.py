"""Benchmarks of caches."""
