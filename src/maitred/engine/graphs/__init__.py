"""Decode steps recorded once and replayed: what a GPU spares the host."""
