"""Prefix caches of replicas: which replica holds how much of a prompt. Pure."""
