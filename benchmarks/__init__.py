"""Measured claims: `python -m benchmarks.<name>` writes JSON under `benchmarks/results/`."""
