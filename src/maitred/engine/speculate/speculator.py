"""Puts drafts into a step, as many as are expected to pay, and learns from what became of them.

An answer is the same with drafts and without. The random bits of a token belong to its position, so the model's own
choice at every drafted position is known once the rows are computed: drafts are kept as far as they are what would have
been chosen anyway, and nothing else follows from them. That is stricter than the usual test (Leviathan et al., ICML'23;
Chen et al., 2023), which keeps the distribution but not the tokens, and accepts somewhat less often from a draft that
is sampled with bits of its own.

Drafts take no KV blocks: they go where their sequence has room behind its last token, in blocks that it holds anyway.
So nothing is preempted or evicted for a guess, and one that was wrong is overwritten by what comes in its place.

A batch in which no draft could pay must not notice that somebody looks. So nobody looks for a while where nothing was
found: the time spent in vain is a small share of all, and gets smaller the longer nothing is found.
"""

from typing import NamedTuple, Protocol

from maitred.core.clock import Clock
from maitred.core.replica import StepTimes
from maitred.engine.grammar.constraints import Constraints
from maitred.engine.grammar.state import SpeculativeGrammarState
from maitred.engine.scheduler.plan import Chunk, StepPlan
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.step_times import StepWork
from maitred.engine.speculate.acceptance import Acceptance
from maitred.engine.speculate.benefit import SpeculationBenefit
from maitred.engine.speculate.guess import WRITTEN, DraftAuthor, DraftRequest, DraftTokens
from maitred.engine.speculate.ngram import NgramDrafter

_VAIN_SHARE, _LEAST_VAIN_SHARE = 0.004, 0.001
"""Of the time that may be spent on looking in vain; the second where that has been so for long."""
_LONGEST_REST_S = 1.0
_DORMANT_STEPS = 8
"""For which nobody asks again whether drafts might pay where a row was found to be too dear for that."""
_LEAST_CHANCE = 0.04
"""Of a draft to be right. No row is so cheap that less would pay."""


class DraftBudget(Protocol):
    """Budget of draft rows: `maitred.engine.scheduler.scheduler.Scheduler.draft_budget`."""

    def __call__(self, plan: StepPlan, /, *, writing_s: float) -> int:
        """Rows of drafts that a plan can still take, if each takes so long to write."""
        ...


class Speculator:
    """Chooses the drafts of each step.

    Args:
        drafter: Who guesses by looking up, if anybody.
        most_tokens: Drafts of one sequence in one step at most.
        clock: Tells what looking and writing take.
        worth: Says how many pay.
        constraints: Where sequences stand in their grammars; None: those that have one get no drafts.
        author: Who writes guesses, if anybody.
    """

    def __init__(
        self,
        drafter: NgramDrafter | None,
        most_tokens: int,
        clock: Clock,
        *,
        worth: SpeculationBenefit | None = None,
        constraints: Constraints | None = None,
        author: DraftAuthor | None = None,
    ) -> None:
        self._drafter = drafter
        self._author = author
        self._most = most_tokens
        self._clock = clock
        self._constraints = constraints
        self._acceptance = Acceptance()
        self._benefit = worth or SpeculationBenefit()
        self._foretold: dict[int, list[_ForetoldDraft]] = {}
        """By sequence: its last guesses."""
        self._paused_until_s = 0.0
        self._in_vain = 0
        """Looks, since there was something."""

    def extend(self, plan: StepPlan, budget: DraftBudget, times: StepTimes) -> float:
        """Adds drafts to the decodes of a plan.

        Args:
            plan: Has everything else.
            budget: Says how many rows it can take yet.
            times: What steps take.

        Returns:
            Seconds for which drafts were written.
        """
        start_s = self._clock.monotonic_s()
        if start_s < self._paused_until_s or not plan.decodes:
            return 0.0
        work = StepWork.of_decodes(plan)
        if not self._benefit.may_pay(work, self._most * work.decodes, times):
            dormant_s = _DORMANT_STEPS * times.decoding(work.decodes, work.context_tokens)
            self._paused_until_s = start_s + min(dormant_s, _LONGEST_REST_S)
            return 0.0
        pass_s = self._author.pass_s(work.decodes, work.context_tokens) if self._author is not None else 0.0
        rows = budget(plan, writing_s=pass_s / work.decodes)
        if rows < 1:
            return 0.0
        chosen = self._choose(plan, work, rows, times, pass_s)
        looked_s = self._clock.monotonic_s()
        self._pause(chosen != [], start_s, looked_s)
        if not chosen:
            return 0.0
        unused = rows - sum([length for _, _, length in chosen])
        self._draft(chosen, unused, rows)
        return self._clock.monotonic_s() - looked_s if self._author is not None else 0.0

    def on_step_time(self, work: StepWork, seconds: float, times: StepTimes) -> None:
        """Notes how long a step took; as `SpeculationBenefit.on_step_time`."""
        self._benefit.on_step_time(work, seconds, times)

    def forget(self, sequence: Sequence) -> None:
        """The sequence lost its blocks: finished, cancelled or preempted."""
        for guesser in (self._drafter, self._author):
            if guesser is not None:
                guesser.forget(sequence)
        self._acceptance.forget(sequence.key)
        self._foretold.pop(sequence.key, None)

    def _choose(
        self, plan: StepPlan, work: StepWork, budget: int, times: StepTimes, pass_s: float
    ) -> "list[tuple[Chunk, DraftTokens, int]]":
        """The guesses that drafts are made of, and how long these are."""
        step_s = times.decoding(work.decodes, work.context_tokens)
        written_price = min(1.0, pass_s / step_s) if step_s > 0 else 0.0
        guesses = []
        for chunk in plan.decodes:
            limit = self._limit(chunk)
            if limit > 0:
                guess = self._draft_tokens(chunk.sequence, limit, written_price)
                if guess is not None:
                    guesses.append((chunk, guess))
        lengths = self._lengths(guesses, work, budget, times, pass_s)
        return [(chunk, guess, length) for (chunk, guess), length in zip(guesses, lengths, strict=True) if length]

    def _draft(self, chosen: "list[tuple[Chunk, DraftTokens, int]]", unused: int, budget: int) -> None:
        """Makes the drafts that were chosen.

        Args:
            chosen: Of what.
            unused: Rows beyond, for what grammars force.
            budget: Rows of the step.
        """
        made: list[tuple[Chunk, SpeculativeGrammarState]] = []
        wanted = []
        for chunk, guess, length in chosen:
            sequence = chunk.sequence
            most = min(length + unused, self._limit(chunk)) if sequence.sampling.grammar is not None else length
            unused -= most - length
            supposition = (
                SpeculativeGrammarState() if self._constraints is None else self._constraints.suppose(sequence.key)
            )
            made.append((chunk, supposition))
            if guess.tokens is None:
                wanted.append(DraftRequest(sequence, length, most, supposition))
            else:
                supposition.follow(guess.tokens[:length], most)
        if wanted and self._author is not None:
            self._author.write(wanted, budget)
            for want in wanted:
                tokens = tuple(want.supposition.tokens)
                self._foretell(want.sequence, WRITTEN, tokens)
        for chunk, supposition in made:
            if supposition.tokens:
                chunk.drafts, chunk.draws = tuple(supposition.tokens), tuple(supposition.draws)

    def _pause(self, found: bool, start_s: float, end_s: float) -> None:
        """After a look in vain nobody looks for as long as makes up for it."""
        if found:
            self._in_vain = 0
            return
        self._in_vain += 1
        share = max(_LEAST_VAIN_SHARE, _VAIN_SHARE / self._in_vain)
        self._paused_until_s = end_s + min((end_s - start_s) / share, _LONGEST_REST_S)

    def _limit(self, chunk: Chunk) -> int:
        """Drafts that a decode may have at most."""
        sequence = chunk.sequence
        if not chunk.samples or (sequence.sampling.grammar is not None and not self._knows_position(sequence)):
            return 0
        # The step gives one token beyond the drafts that are right.
        tokens_left = sequence.max_tokens - sequence.output_tokens - 1
        return min(self._most, sequence.table.capacity_tokens - len(sequence.tokens), tokens_left)

    def _knows_position(self, sequence: Sequence) -> bool:
        """Whether the grammar's position is known; a sequence that begins or comes back with this step has none yet."""
        return self._constraints is not None and sequence.key in self._constraints

    def _draft_tokens(self, sequence: Sequence, limit: int, written_price: float) -> DraftTokens | None:
        """The next guess; and the last ones are compared with what came, whether they were computed or not."""
        key = sequence.key
        for kind, place, tokens in self._foretold.pop(key, ()):
            self._acceptance.record(key, kind, tokens, sequence.tokens[place : place + len(tokens)])
        guess = None if self._drafter is None else self._drafter.draft(sequence, limit)
        if guess is not None and guess.tokens is not None:
            self._foretell(sequence, guess.kind, guess.tokens)
        if self._author is None or not self._author.follows(sequence, limit):
            return guess
        if guess is None or self._acceptance.of(key, WRITTEN) - written_price > self._acceptance.of(key, guess.kind):
            return DraftTokens(WRITTEN, limit, None)
        return guess

    def _foretell(self, sequence: Sequence, kind: int, tokens: tuple[int, ...]) -> None:
        self._foretold.setdefault(sequence.key, []).append(_ForetoldDraft(kind, len(sequence.tokens), tokens))

    def _lengths(
        self, guesses: list[tuple[Chunk, DraftTokens]], work: StepWork, budget: int, times: StepTimes, pass_s: float
    ) -> list[int]:
        """How many tokens of each guess are drafted: in all as many as pay, the most probable ones first."""
        chances = []
        for place, (chunk, guess) in enumerate(guesses):
            share = chance = self._acceptance.of(chunk.sequence.key, guess.kind)
            for nth in range(guess.length):
                if chance < _LEAST_CHANCE:
                    break
                chances.append((chance, place, 0 if guess.tokens is not None else nth + 1))
                chance *= share
        chances.sort(reverse=True)
        del chances[budget:]
        gains, writing_s, gain, passes = [], [], 0.0, 0
        for chance, _, nth in chances:
            gain += chance
            passes = max(passes, nth)
            gains.append(gain)
            writing_s.append(passes * pass_s)
        lengths = [0] * len(guesses)
        rows = self._benefit.rows(work, gains, times, writing_s if pass_s else None)
        for _, place, _ in chances[:rows]:
            lengths[place] += 1
        return lengths


class _ForetoldDraft(NamedTuple):
    """A guess, and the place of its first token."""

    kind: int
    position: int
    tokens: tuple[int, ...]
