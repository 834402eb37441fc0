"""Error type for faulty or unenforceable grammars."""


class GrammarFault(ValueError):
    """A caller's constraint is faulty or cannot be enforced; the message says what to do."""
