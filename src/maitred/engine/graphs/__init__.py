"""Graphs of decode steps: recorded once and replayed, which saves the host's kernel launches."""
