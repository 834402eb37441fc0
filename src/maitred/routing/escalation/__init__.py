"""Escalation: checks of answers, and what follows for an answer that fails one and goes to the next larger model."""
