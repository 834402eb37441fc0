"""Fair queueing: pure code that orders the gateway's queue and the engine's batch."""
