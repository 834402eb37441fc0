"""Scheduler: chooses the tokens of each step from the sequences, the KV blocks and sampled tokens."""
