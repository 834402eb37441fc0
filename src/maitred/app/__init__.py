"""Composition root: makes and connects the parts, and names the stages of a request in order."""
