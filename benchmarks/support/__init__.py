"""Modules that benchmarks share; nothing here is run by itself."""
