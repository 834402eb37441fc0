"""Benchmarks of the engine: kernels, steps, sampling, speculation, start-up."""
