"""Cache: answers that need no second run."""
