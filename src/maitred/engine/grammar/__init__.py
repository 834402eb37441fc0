"""Answers that are words of a formal language: which tokens may come next, and which must."""
