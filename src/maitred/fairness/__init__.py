"""Fair queueing: decides who is next; pure, and shared by the gateway's queue and the engine's batch."""
