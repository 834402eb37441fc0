"""Trials of an engine at its start, so that it need not learn its times from the first requests."""
