"""Protocols of speculation: what it asks of whoever guesses.

There are two kinds. `NgramDrafter` looks up what it says, which costs next to nothing. A `DraftAuthor` writes: it
computes its guesses token by token, so each has its price, and how many are wanted is decided before.
"""

from typing import NamedTuple, Protocol

from maitred.engine.grammar.state import SpeculativeGrammarState
from maitred.engine.scheduler.sequence import Sequence

WRITTEN = -1
"""The kind of all guesses of an author."""


class DraftTokens(NamedTuple):
    """Guess for one sequence: how long it is, and its tokens if they are known already.

    Attributes:
        kind: How much speaks for it; guesses of one kind are about equally often right.
        length: Tokens that there would be.
        tokens: They; None: an author has to write them.
    """

    kind: int
    length: int
    tokens: tuple[int, ...] | None


class DraftRequest(NamedTuple):
    """A guess that an author shall write.

    Attributes:
        sequence: Of which.
        length: Tokens that are wanted.
        most: Tokens that there is room for, with what a grammar forces behind them.
        supposition: Takes them.
    """

    sequence: Sequence
    length: int
    most: int
    supposition: SpeculativeGrammarState


class DraftAuthor(Protocol):
    """Writes the next tokens of sequences.

    A Protocol, because speculation imports no torch.
    """

    def pass_s(self, sequences: int, context_tokens: int) -> float:
        """Returns the seconds of one further token for so many sequences, with so much context; 0: not measured."""
        ...

    def follows(self, sequence: Sequence, most: int) -> bool:
        """Whether it can write so many tokens: neither is the text too long, nor what has to be read of it first."""
        ...

    def write(self, wanted: list[DraftRequest], most_tokens: int) -> None:
        """Writes guesses; of a sequence that it has fallen behind it may write none yet.

        Args:
            wanted: Which.
            most_tokens: Tokens that it may read at once of those that it has not followed.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence does not run any more; whether it was ever asked about or not."""
        ...
