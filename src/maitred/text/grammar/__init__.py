"""Formal languages that an answer can be held to: from what a caller sends to a grammar that llguidance takes."""
