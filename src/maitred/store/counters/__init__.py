"""Counters and leases: in memory for one gateway, on Redis for several."""
