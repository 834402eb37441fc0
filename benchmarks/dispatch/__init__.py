"""Benchmarks of dispatch: fairness, queues, overload, predictions."""
