"""Agents: processes that own engines and start and stop them when a controller says so."""
