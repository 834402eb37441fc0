"""Result of trying a grammar, as the compiling process sends it to the gateway.

A module of its own: the gateway reads results without importing what compiles grammars.
"""

import msgspec

from maitred.core.grammar import Grammar


class GrammarResult(msgspec.Struct, frozen=True, array_like=True):
    """Result of a compilation: a grammar, or what is wrong with the constraint."""

    grammar: Grammar | None = None
    fault: str = ""


LENGTH_BYTES = 4
"""Before each question and each answer."""
