"""Decoder-only language models: what a checkpoint says of itself, its weights, and the forward pass."""
