"""Faults, and the checks of what callers saw of them."""
