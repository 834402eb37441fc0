"""Metrics and logs; fed by events, never asked for a decision."""
