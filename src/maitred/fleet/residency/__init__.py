"""Several models on one machine that does not hold all of them at once: loaded on demand, unloaded when others wait."""
