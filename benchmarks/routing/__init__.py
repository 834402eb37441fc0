"""Benchmarks of routing: replicas, canaries, model choice, models on demand."""
