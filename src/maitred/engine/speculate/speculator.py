"""Speculator: adds as many drafts to a step as should pay, and learns from their acceptance.

An answer is identical with and without drafts. The random bits of a token depend only on its position, so the model's
own token at every drafted position is known after the step. Drafts are kept as far as they equal these tokens, and have
no other effect. This test is stricter than the usual one (Leviathan et al., ICML'23; Chen et al., 2023), which keeps
the distribution but not the tokens. It accepts somewhat less often if drafts are sampled with different random bits.

Drafts take no further KV blocks: they use free positions behind the last token, in blocks that the sequence already
holds. So a draft causes no preemption and no eviction, and the right tokens overwrite a wrong draft.

In a batch where no draft pays, the search for drafts must cost almost nothing. So after a search without result the
next search waits. The share of time for useless searches is small, and falls the longer no draft is found.
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
"""Maximum share of time for searches without result, at first and after many of them."""
_LONGEST_REST_S = 1.0
_DORMANT_STEPS = 8
"""Steps without a new check after a draft row was found to be too expensive."""
_LEAST_CHANCE = 0.04
"""Minimum probability of a draft token to be right. No row is cheap enough for a smaller probability to pay."""


class DraftBudget(Protocol):
    """Budget of draft rows: `maitred.engine.scheduler.scheduler.Scheduler.draft_budget`."""

    def __call__(self, plan: StepPlan, /, *, writing_s: float) -> int:
        """Returns the draft rows that a plan can still take, if writing each takes `writing_s`."""
        ...


class Speculator:
    """Speculator that chooses the drafts of each step.

    Args:
        drafter: Drafter that looks drafts up; None: there is none.
        most_tokens: Maximum draft tokens of one sequence in one step.
        clock: Clock that measures searching and writing.
        worth: Decides how many draft rows pay.
        constraints: Grammar states of the sequences; None: sequences with a grammar get no drafts.
        author: Draft model that writes drafts; None: there is none.
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
        """Sequence key -> its latest drafts."""
        self._paused_until_s = 0.0
        self._in_vain = 0
        """Number of searches since the last one with a result."""

    def extend(self, plan: StepPlan, budget: DraftBudget, times: StepTimes) -> float:
        """Adds drafts to the decodes of a plan.

        Args:
            plan: Plan of the step, complete except for drafts.
            budget: Returns how many draft rows the plan can still take.
            times: Model of step times.

        Returns:
            Seconds that writing the drafts took.
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
        """Forgets a sequence that lost its blocks: it was finished, cancelled or preempted."""
        for guesser in (self._drafter, self._author):
            if guesser is not None:
                guesser.forget(sequence)
        self._acceptance.forget(sequence.key)
        self._foretold.pop(sequence.key, None)

    def _choose(
        self, plan: StepPlan, work: StepWork, budget: int, times: StepTimes, pass_s: float
    ) -> "list[tuple[Chunk, DraftTokens, int]]":
        """Chooses the drafts to use, with their lengths."""
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
        """Makes the chosen drafts and adds them to their chunks.

        Args:
            chosen: Chunk, draft and length of each chosen draft.
            unused: Further rows of the budget, for tokens that grammars force.
            budget: Draft rows of the step.
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
        """Pauses the search after one without result, so that searches take a small share of time."""
        if found:
            self._in_vain = 0
            return
        self._in_vain += 1
        share = max(_LEAST_VAIN_SHARE, _VAIN_SHARE / self._in_vain)
        self._paused_until_s = end_s + min((end_s - start_s) / share, _LONGEST_REST_S)

    def _limit(self, chunk: Chunk) -> int:
        """Returns the maximum draft tokens of a decode."""
        sequence = chunk.sequence
        if not chunk.samples or (sequence.sampling.grammar is not None and not self._knows_position(sequence)):
            return 0
        # The step generates one token more than the accepted drafts.
        tokens_left = sequence.max_tokens - sequence.output_tokens - 1
        return min(self._most, sequence.table.writable_tokens - len(sequence.tokens), tokens_left)

    def _knows_position(self, sequence: Sequence) -> bool:
        """Returns whether the sequence's grammar state exists; it is made in its first step after admission."""
        return self._constraints is not None and sequence.key in self._constraints

    def _draft_tokens(self, sequence: Sequence, limit: int, written_price: float) -> DraftTokens | None:
        """Returns the next draft; compares the last ones with the new tokens, computed or not."""
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
        """Returns the draft length of each sequence: as many tokens as pay, the most probable first."""
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
    """Draft with the position of its first token."""

    kind: int
    position: int
    tokens: tuple[int, ...]
