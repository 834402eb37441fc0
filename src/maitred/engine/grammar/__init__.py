"""Grammar-constrained answers: the tokens that are allowed next, and the tokens that are forced."""
