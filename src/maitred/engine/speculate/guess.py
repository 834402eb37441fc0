"""Data and protocol of drafts for speculative decoding.

There are two sources of drafts. `NgramDrafter` looks drafts up, which costs almost nothing. A `DraftAuthor` computes
drafts token by token. Each token has a cost, so the number of tokens is decided before they are written.
"""

from typing import NamedTuple, Protocol

from maitred.engine.grammar.state import SpeculativeGrammarState
from maitred.engine.scheduler.sequence import Sequence

WRITTEN = -1
"""Kind of all drafts that a `DraftAuthor` writes."""


class DraftTokens(NamedTuple):
    """Draft for one sequence: its length, and its tokens if they are already known.

    Attributes:
        kind: Class of confidence; drafts of one kind have about the same acceptance rate.
        length: Number of draft tokens.
        tokens: Draft tokens; None: a `DraftAuthor` has to write them.
    """

    kind: int
    length: int
    tokens: tuple[int, ...] | None


class DraftRequest(NamedTuple):
    """Request for a draft that a `DraftAuthor` has to write.

    Attributes:
        sequence: Sequence that the draft continues.
        length: Number of tokens to write.
        most: Maximum tokens, those that a grammar forces included.
        supposition: Receives the tokens.
    """

    sequence: Sequence
    length: int
    most: int
    supposition: SpeculativeGrammarState


class DraftAuthor(Protocol):
    """Author that writes the next tokens of sequences.

    A Protocol, because this module must not import torch.
    """

    def pass_s(self, sequences: int, context_tokens: int) -> float:
        """Returns the seconds of one further token for sequences with this context; 0: not measured yet."""
        ...

    def follows(self, sequence: Sequence, most: int) -> bool:
        """Returns whether it can write `most` tokens; False if the text or its unread part is too long."""
        ...

    def write(self, wanted: list[DraftRequest], most_tokens: int) -> None:
        """Writes drafts; a sequence with many unread tokens may get no draft yet.

        Args:
            wanted: Drafts to write.
            most_tokens: Maximum unread tokens that it may read in this call.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """Forgets a sequence that no longer runs; an unknown sequence is ignored."""
        ...
