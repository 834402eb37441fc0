"""Decoder-only language models: configuration, weights and forward pass."""
