"""Replicas as processes: starting, supervising and stopping them."""
