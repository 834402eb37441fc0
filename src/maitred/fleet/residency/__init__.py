"""Residency: several models that share one machine's memory, loaded on demand and unloaded when others are needed."""
