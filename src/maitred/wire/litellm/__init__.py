"""Bodies and queries of LiteLLM's administration, for the compatibility layer."""
