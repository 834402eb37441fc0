"""Speculative decoding: draft tokens are computed with the answer and kept if they are right."""
