"""Replicas as the gateway sees them: transport, health and load reports."""
