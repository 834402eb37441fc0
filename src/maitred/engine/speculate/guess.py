"""What speculation asks of whoever guesses."""

from typing import NamedTuple, Protocol

from maitred.engine.scheduler.sequence import Sequence


class Guess(NamedTuple):
    """What could be guessed of one sequence.

    Attributes:
        kind: How much speaks for it; guesses of one kind are about equally often right.
        length: Tokens that there would be.
        tokens: They, where they cost nothing to know; None: only `Drafter.draft` finds them.
    """

    kind: int
    length: int
    tokens: tuple[int, ...] | None


class Drafter(Protocol):
    """Guesses the next tokens of sequences."""

    def guess(self, sequence: Sequence, most: int) -> Guess | None:
        """What it could say of a sequence, in at most so many tokens; None: nothing. This must cost next to nothing."""
        ...

    def draft(self, wanted: list[tuple[Sequence, Guess, int]]) -> list[tuple[int, ...]]:
        """The first tokens of guesses, so many of each (at least one)."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence does not run any more; whether it was ever asked about or not."""
        ...
