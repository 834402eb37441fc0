"""Semantic cache at work: it asks the encoder, serves what is certified, and audits what it serves."""
