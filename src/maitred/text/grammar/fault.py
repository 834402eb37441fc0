"""The error that speaks of a grammar."""


class GrammarFault(ValueError):
    """What a caller wants an answer to look like is faulty, or cannot be enforced; the message says what to do."""
