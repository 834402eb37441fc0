"""Metrics, logs and traces: fed by events, without any influence on decisions."""
