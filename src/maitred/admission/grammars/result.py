"""Result of trying a grammar, as the compiling process sends it to the gateway.

This is a separate module, so that the gateway can read results without an import of the compiler.
"""

import msgspec

from maitred.core.grammar import Grammar


class GrammarResult(msgspec.Struct, frozen=True, array_like=True):
    """Result of a compilation: a grammar, or what is wrong with the constraint."""

    grammar: Grammar | None = None
    fault: str = ""


LENGTH_BYTES = 4
"""Size in bytes of the length prefix of each question and each answer."""
