"""Speculative decoding: tokens to come are guessed, computed with the answer, and kept where they are right."""
