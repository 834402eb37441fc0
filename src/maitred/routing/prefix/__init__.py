"""Which replica holds how much of a prompt. Pure."""
