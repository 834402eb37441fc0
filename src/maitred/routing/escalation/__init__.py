"""Escalation: an answer that fails a check is requested again from the next larger model."""
