"""Who is next: pure, and shared by the gateway's queue and the engine's batch, so that both mean the same by fair."""
