"""Cache: stored answers for repeated requests."""
