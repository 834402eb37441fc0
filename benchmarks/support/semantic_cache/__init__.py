"""Streams of questions, minimal edits, and simulated scopes of the semantic cache."""
