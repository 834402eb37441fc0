"""What would come of an answer if guesses at its next tokens were right.

A guess may be impossible under the answer's grammar, and where it is not, the grammar may force tokens behind it. Those
come without being chosen, so they are computed like guesses but nothing is sampled before them: of the tokens
``g1 f f g2``, of which `f` are forced, the model chooses before ``g1``, before ``g2`` and at the end.

The sequence's own place in its grammar does not move: every guess is tried on a copy, and each copy is kept, for it
says what may come at its place.
"""

from collections.abc import Sequence

from maitred.engine.grammar.state import GrammarState


class SpeculativeGrammarState:
    """The next tokens of one sequence, supposed.

    Args:
        word: Where the sequence stands in its grammar, if it has one.

    Attributes:
        tokens: Guesses, with what is forced behind each.
        draws: How many of the tokens stand before each choice of the model.
        words: The place in the grammar at each choice; empty without a grammar.
        open: Whether more can follow.
    """

    __slots__ = ("draws", "open", "tokens", "words")

    def __init__(self, word: GrammarState | None = None) -> None:
        self.tokens: list[int] = []
        self.draws = [0]
        self.words = [] if word is None else [word]
        self.open = True

    def take(self, token: int, most: int) -> None:
        """One more guess; there are no more tokens than `most`, what is forced included."""
        if not self.words:
            self.tokens.append(token)
            self.draws.append(len(self.tokens))
            return
        word = self.words[-1].copy()
        if word.take(token) is not None:
            self.open = False
            return
        self.tokens += [token, *word.forced()]
        if word.ended or len(self.tokens) > most:
            self.open = False
            del self.tokens[most:]
            return
        self.words.append(word)
        self.draws.append(len(self.tokens))

    def follow(self, guess: Sequence[int], most: int) -> None:
        """Takes the tokens of a guess, as long as what is forced agrees with it."""
        taken = self.tokens
        while self.open and len(taken) < min(len(guess), most) and taken == [*guess[: len(taken)]]:
            self.take(guess[len(taken)], most)

    def after(self, word: GrammarState, token: int) -> tuple[GrammarState, list[int]] | None:
        """Where a sequence is that was at `word` and got `token`, and what was forced; None: nothing is known of it."""
        for choice, place in enumerate(self.words[:-1]):
            if place is word:
                start, end = self.draws[choice : choice + 2]
                return (self.words[choice + 1], self.tokens[start + 1 : end]) if self.tokens[start] == token else None
        return None
