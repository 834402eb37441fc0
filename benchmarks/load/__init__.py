"""Benchmarks of the load tester, and loads played by it."""
