"""Benchmarks of limits, budgets and the ledger under races and crashes."""
