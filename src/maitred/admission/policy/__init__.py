"""Which limits hold for a request, and what a refusal says: pure rules."""
