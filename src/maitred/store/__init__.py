"""Store: tenants, keys, limits and the ledger in a database; counters in memory or Redis."""
