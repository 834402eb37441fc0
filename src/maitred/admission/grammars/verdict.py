"""What is said between the gateway and the processes that try grammars for it."""

import msgspec

from maitred.core.grammar import Grammar

LENGTH_BYTES = 4
"""Before each question and each answer."""


class GrammarResult(msgspec.Struct, frozen=True, array_like=True):
    """What has come of a question: a grammar, or what is wrong with it."""

    grammar: Grammar | None = None
    fault: str = ""
