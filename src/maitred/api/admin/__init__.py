"""Routes of the administration: tenants, keys, limits, budgets and usage."""
