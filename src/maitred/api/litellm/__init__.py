"""Routes of LiteLLM's administration, on our tenants, keys, limits and ledger."""
