"""Migration from LiteLLM: its proxy's configuration file becomes ours."""
