"""Identity: which tenant a key belongs to, and what it may do."""
