"""Puts drafts into a step, as many as are expected to pay, and learns from what became of them.

An answer is the same with drafts and without. The random bits of a token belong to its position, so the model's own
choice at every drafted position is known once the rows are computed: drafts are kept as far as they are what would have
been chosen anyway, and nothing else follows from them. That is stricter than the usual test (Leviathan et al., ICML'23;
Chen et al., 2023), which keeps the distribution but not the tokens, and accepts somewhat less often from a draft that
is sampled with bits of its own.

Drafts take no KV blocks: they go where their sequence has room behind its last token, in blocks that it holds anyway.
So nothing is preempted or evicted for a guess, and one that was wrong is overwritten by what comes in its place.
"""

from maitred.core.ports import StepTimes
from maitred.engine.scheduler.plan import Chunk, StepPlan
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.step_times import StepWork
from maitred.engine.speculate.acceptance import Acceptance
from maitred.engine.speculate.guess import Drafter, Guess
from maitred.engine.speculate.worth import Worth

_LOOK_S = 5e-6
"""What it takes to look whether a sequence can be guessed, more or less..."""
_LOOK_SHARE = 0.004
"""...and how much of the time may be spent on looking in vain."""
_LEAST_CHANCE = 0.04
"""Of a draft to be right. No row is so cheap that less would pay."""


class Speculator:
    """Chooses drafts.

    Args:
        drafter: Who guesses.
        most_tokens: Drafts of one sequence in one step at most.
        worth: Says how many pay.
    """

    def __init__(self, drafter: Drafter, most_tokens: int, worth: Worth | None = None) -> None:
        self._drafter = drafter
        self._most = most_tokens
        self._acceptance = Acceptance()
        self._worth = worth or Worth()
        self._foretold: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        """By sequence: the kind of its last guess, the place in its tokens, and the tokens."""
        self._rest_s = 0.0
        """Until then nobody looks, because the last look was in vain: as long as makes up for it."""

    def extend(self, plan: StepPlan, *, room: int, times: StepTimes) -> None:
        """Adds drafts to the decodes of a plan.

        Args:
            plan: Has everything else.
            room: Rows that the step can take yet.
            times: What steps take.
        """
        work = StepWork.of_decodes(plan)
        most = min(room, self._most * work.decodes)
        self._rest_s -= times.decoding(work.decodes, work.context_tokens)
        if most < 1 or self._rest_s > 0 or not self._worth.may_pay(work, most, times):
            return
        guesses = []
        looks = 0
        for chunk in plan.decodes:
            limit = self._limit(chunk)
            if limit > 0:
                looks += 1
                guess = self._guess(chunk.sequence, limit)
                if guess is not None:
                    guesses.append((chunk, guess))
        lengths = self._lengths(guesses, work, room, times)
        wanted = [(chunk, guess, length) for (chunk, guess), length in zip(guesses, lengths, strict=True) if length]
        self._rest_s = 0.0 if wanted else _LOOK_S / _LOOK_SHARE * looks
        drafts = self._drafter.draft([(chunk.sequence, guess, length) for chunk, guess, length in wanted])
        for (chunk, guess, _), tokens in zip(wanted, drafts, strict=True):
            chunk.drafts = tokens
            if guess.tokens is None:
                self._foretold[chunk.sequence.key] = guess.kind, len(chunk.sequence.tokens), tokens

    def measured(self, work: StepWork, seconds: float, times: StepTimes) -> None:
        """See `Worth.measured`."""
        self._worth.measured(work, seconds, times)

    def forget(self, sequence: Sequence) -> None:
        """The sequence lost its blocks: finished, cancelled or preempted."""
        self._drafter.forget(sequence)
        self._acceptance.forget(sequence.key)
        self._foretold.pop(sequence.key, None)

    def _limit(self, chunk: Chunk) -> int:
        """Drafts that a decode may have at most."""
        sequence = chunk.sequence
        if not chunk.samples or not _foreseeable(sequence):
            return 0
        # The step gives one token beyond the drafts that are right.
        tokens_left = sequence.max_tokens - sequence.output_tokens - 1
        return min(self._most, sequence.table.capacity_tokens - len(sequence.tokens), tokens_left)

    def _guess(self, sequence: Sequence, limit: int) -> Guess | None:
        """The next guess; and the last one is compared with what came, whether it was computed or not."""
        foretold = self._foretold.pop(sequence.key, None)
        if foretold is not None:
            kind, place, tokens = foretold
            self._acceptance.tested(sequence.key, kind, tokens, sequence.tokens[place : place + len(tokens)])
        guess = self._drafter.guess(sequence, limit)
        if guess is not None and guess.tokens is not None:
            self._foretold[sequence.key] = guess.kind, len(sequence.tokens), guess.tokens
        return guess

    def _lengths(self, guesses: list[tuple[Chunk, Guess]], work: StepWork, room: int, times: StepTimes) -> list[int]:
        """How many tokens of each guess are drafted: in all as many as pay, the most probable ones first."""
        chances = []
        for place, (chunk, guess) in enumerate(guesses):
            share = chance = self._acceptance.of(chunk.sequence.key, guess.kind)
            for _ in range(guess.length):
                if chance < _LEAST_CHANCE:
                    break
                chances.append((chance, place))
                chance *= share
        chances.sort(reverse=True)
        del chances[room:]
        gains, gain = [], 0.0
        for chance, _ in chances:
            gain += chance
            gains.append(gain)
        lengths = [0] * len(guesses)
        for _, place in chances[: self._worth.rows(work, gains, times)]:
            lengths[place] += 1
        return lengths


def _foreseeable(sequence: Sequence) -> bool:
    """Whether the choice at a position depends on nothing but the tokens before it and the position.

    Penalties count the tokens of the answer as they are chosen; a grammar moves on with each of them.
    """
    sampling = sequence.sampling
    return (
        sampling.grammar is None
        and sampling.repetition_penalty == 1.0
        and sampling.presence_penalty == 0.0
        and sampling.frequency_penalty == 0.0
    )
