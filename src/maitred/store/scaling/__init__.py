"""Storage of scaling: who decides on the replicas of a pool, and what was decided."""
