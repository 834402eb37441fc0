"""Search for the highest rate that a server sustains, with few trials although each is noisy.

`KneeSearch` decides and does no I/O; `sweep` plays the rates that it asks for. Latency stays flat until the server is
full and then rises steeply. So the search brackets this point by doubling (or halving) the rate, and then halves the
bracket on a logarithmic scale.
"""

import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from maitred.core.errors import InvalidRequest
from maitred.load.measure.cost import Limit
from maitred.load.measure.record import UserOutcome
from maitred.load.measure.result import LoadResult
from maitred.load.spec import LoadSpec, ObjectivesSpec

FORMAT = "maitred-sweep/1"

Reason = Literal["found", "at_highest", "below_lowest", "tester", "trials"]
"""Reason why a search ended: the knee is known to the tolerance; the highest allowed rate passed; the lowest allowed
rate failed; the tester was the limit; or the trials were used up."""


class SweepTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One run at one rate.

    Attributes:
        rate_per_s: Due sessions per second.
        objective: Share of the requests that must meet the objectives; None: only keeping up counts.
        judged, met: Counted requests that were not cancelled, and those of them that met the objectives. Without
            objectives, to be complete is to meet them: a server must not keep up by refusing.
        due: Requests due in the second half of the window.
        growth: Growth of the number of open requests from the middle of the window to its end. A server that keeps up
            ends as many requests as are due, so this is 0 apart from chance.
        growth_deviation: Standard deviation of `growth` from chance alone.
        requests_per_s, output_tokens_per_s, goodput_per_s: Rates from the summary of the run.
        ttft_p50_s, ttft_p95_s, itl_p95_s: Times from the summary of the run; None: there are none.
        failed: Share of the counted requests that were neither complete nor cancelled.
        limit: Limit of the tester, as in `TesterCost`.
    """

    rate_per_s: float
    objective: float | None
    judged: int
    met: int
    due: int
    growth: float
    growth_deviation: float
    requests_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    goodput_per_s: float = 0.0
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    itl_p95_s: float | None = None
    failed: float = 0.0
    limit: Limit = "none"

    @classmethod
    def of(cls, result: LoadResult) -> "SweepTrial":
        """Makes the trial of one rate from the result of its run."""
        window, times, summary = result.window, result.times, result.summary
        middle_s = (window.from_s + window.until_s) / 2

        def open_at(at_s: float) -> int:
            return int((times.intended_s <= at_s).sum() - (times.ended_s <= at_s).sum())

        halfway, last = open_at(middle_s), open_at(window.until_s)
        counted = result.counted_flags()
        judged = counted & ~times.cancelled
        ended_well = summary.outcomes.get(UserOutcome.COMPLETE, 0) + summary.outcomes.get(UserOutcome.CANCELLED, 0)
        rate_per_s = result.spec["arrivals"]["rate_per_s"]
        return cls(
            rate_per_s=float(rate_per_s or int(counted.sum()) / max(window.seconds, 1e-9)),
            objective=result.objectives.attainment,
            judged=int(judged.sum()),
            met=int((judged & result.met_flags()).sum()),
            due=int(((times.intended_s > middle_s) & (times.intended_s <= window.until_s)).sum()),
            growth=float(last - halfway),
            # The variance of the number of open requests is at most Poisson, at both times.
            growth_deviation=math.sqrt(max(halfway + last, 1)),
            requests_per_s=summary.requests_per_s,
            output_tokens_per_s=summary.output_tokens_per_s,
            goodput_per_s=summary.goodput_per_s,
            ttft_p50_s=summary.ttft.p50,
            ttft_p95_s=summary.ttft.p95,
            itl_p95_s=summary.itl.p95,
            failed=1 - ended_well / summary.requests if summary.requests else 0.0,
            limit=result.tester.limit,
        )

    @property
    def attainment(self) -> float:
        """Share of the requests that met the objectives."""
        return self.met / self.judged if self.judged else 0.0

    @property
    def passed(self) -> bool:
        """Whether the rate is sustained according to this trial alone."""
        return RateEvidence([self]).passed


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a search for the highest sustained rate.

    Attributes:
        format: `FORMAT`.
        spec: Settings of all trials except for their rate, as plain data.
        command: Shell command; empty: the sweep was not started from a shell.
        tolerance: Relative tolerance of the knee.
        objective: As in `SweepTrial`; None: there are no time objectives, so the knee is where the server stops keeping
            up.
        trials: Trials in the order in which they were played.
        knee_per_s: Highest rate known to pass; None: none passed.
        fails_per_s: Lowest rate known to fail; None: none failed. The knee lies between the two.
        goodput_per_s: Goodput at the knee, as the mean over its trials. Without objectives: requests per second at the
            knee.
        reason: Reason why the search ended.
        verdict: Result of the search in one sentence, for people.
    """

    format: str
    spec: dict[str, object]
    command: str
    tolerance: float
    objective: float | None
    trials: list[SweepTrial]
    knee_per_s: float | None
    fails_per_s: float | None
    goodput_per_s: float | None
    reason: Reason
    verdict: str

    def save(self, path: Path) -> None:
        """Writes the sweep as JSON."""
        try:
            path.write_bytes(msgspec.json.encode(self))
        except OSError as error:
            raise InvalidRequest(f"Cannot write {path}: {error.strerror}. Name another file.") from None

    @classmethod
    def load(cls, path: Path) -> "Sweep":
        """Reads a sweep that `save` wrote.

        Raises:
            InvalidRequest: The file is not a sweep.
        """
        try:
            sweep = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise InvalidRequest(f"Cannot read {path}: {error.strerror}. Name the file of a sweep.") from None
        except msgspec.DecodeError:
            sweep = None
        if sweep is None or sweep.format != FORMAT:
            raise InvalidRequest(f"{path} is not a sweep of this version. Name a file that `maitred load sweep` wrote.")
        return sweep


class RateEvidence:
    """Evidence of all trials at one rate.

    Args:
        trials: Trials at one rate, at least one.
    """

    def __init__(self, trials: list[SweepTrial]) -> None:
        self.trials = trials

    @property
    def keeps_up(self) -> bool:
        """Whether the open requests grew by no more than 5 % of the due ones, as far as chance shows.

        At a low rate, chance changes the number of open requests by a handful. So only a clear excess counts as a
        failure.
        """
        return self._growth_score <= SURE

    @property
    def meets(self) -> bool:
        """Whether enough requests met the objectives; always True without objectives."""
        return self._attainment_score >= 0

    @property
    def passed(self) -> bool:
        """Whether the evidence shows that the rate is sustained."""
        return self.keeps_up and self.meets

    @property
    def sure(self) -> bool:
        """Whether the result is significant (90 %, two-sided)."""
        if self.passed:
            return self._growth_score <= 0 and self._attainment_score > SURE
        return self._growth_score > SURE or self._attainment_score < -SURE

    @property
    def _growth_score(self) -> float:
        """Growth beyond the tolerated growth, in standard deviations."""
        excess = sum(trial.growth - TOLERATED_GROWTH * trial.due for trial in self.trials)
        return excess / max(math.hypot(*(trial.growth_deviation for trial in self.trials)), 1e-9)

    @property
    def _attainment_score(self) -> float:
        """Attainment above the objective, in standard deviations of a rate that meets it exactly."""
        objective = self.trials[0].objective
        if objective is None:
            return 1e9
        judged = sum(trial.judged for trial in self.trials)
        excess = sum(trial.met for trial in self.trials) - objective * judged
        return excess / max(math.sqrt(judged * objective * (1 - objective)), 1e-9) if judged else -1e9


TOLERATED_GROWTH = 0.05
"""Share of the arrivals that may stay unanswered while the server still counts as keeping up."""

SURE = 1.645
"""Number of standard deviations for 90 % confidence, two-sided."""


DOUBLING = 2.0
"""Factor between rates until the knee is bracketed."""

MOST_TRIALS = 30
"""Most trials of a search; from 1 to 1,000 per second at 5 %: 10 to bracket, 4 to narrow, a few more."""

REPEATS = 2
"""Most trials at each rate beside the knee whose first result may be due to chance."""

SETTLES = 3
"""Most trials at each of two rates whose results contradict each other."""


class KneeSearch:
    """Search for the knee: chooses the next rate. It does no I/O, and its only state is the trials.

    The bracket is computed again from all trials after each trial. A repeated trial adds evidence and may move the
    bracket back. If a rate fails below a rate that passes, both are repeated. If the contradiction remains, the failure
    counts, because a rate that is sustained only sometimes is not sustained.

    Args:
        start_rate: First rate to try.
        lowest: Lowest rate to try.
        highest: Highest rate to try.
        tolerance: The search ends when the lowest failing rate is above the highest passing rate by at most this share.

    Raises:
        InvalidRequest: The rates are not in ascending order, or the tolerance is not valid.
    """

    def __init__(self, *, start_rate: float, lowest: float, highest: float, tolerance: float = 0.05) -> None:
        if not 0 < lowest <= start_rate <= highest < math.inf:
            raise InvalidRequest(
                f"A sweep needs 0 < lowest ≤ start ≤ highest, not {lowest:g}, {start_rate:g}, {highest:g}."
            )
        if not 0.01 <= tolerance <= 1:
            raise InvalidRequest(f"The tolerance of a sweep must be between 0.01 and 1, not {tolerance:g}.")
        self._start = start_rate
        self._lowest = lowest
        self._highest = highest
        self._tolerance = tolerance
        self._at: dict[float, list[SweepTrial]] = {}
        self.trials: list[SweepTrial] = []

    def record(self, rate: float, trial: SweepTrial) -> None:
        """Records the result of a trial at a rate that `next_rate` returned."""
        self.trials.append(trial)
        self._at.setdefault(rate, []).append(trial)

    def next_rate(self) -> float | None:
        """Returns the next rate to try; None: the search is over, and `reason` says why."""
        if not self.trials:
            return self._start
        if self.trials[-1].limit == "tester" or len(self.trials) >= MOST_TRIALS:
            return None
        if (contested := self._contested_rate()) is not None:
            return contested
        passes, fails = self.passes, self.fails
        if fails is None and passes is not None and passes < self._highest:
            return min(passes * DOUBLING, self._highest)
        if passes is None and fails is not None and fails > self._lowest:
            return max(fails / DOUBLING, self._lowest)
        if passes is not None and fails is not None and fails > passes * (1 + self._tolerance):
            return math.sqrt(passes * fails)
        for rate in (passes, fails):
            if rate is not None and len(self._at[rate]) < REPEATS and not RateEvidence(self._at[rate]).sure:
                return rate
        return None

    @property
    def passes(self) -> float | None:
        """Highest rate that passes and is below every failing rate."""
        fails = self.fails
        good = [rate for rate in self._passing() if fails is None or rate < fails]
        return max(good, default=None)

    @property
    def fails(self) -> float | None:
        """Lowest rate that fails. Trials that were limited by the tester do not count as failures."""
        return min(self._failing(), default=None)

    @property
    def reason(self) -> Reason:
        """Reason why the search is over, once it is over."""
        if self.trials and self.trials[-1].limit == "tester":
            return "tester"
        passes, fails = self.passes, self.fails
        if fails is None and passes == self._highest:
            return "at_highest"
        if passes is None and fails == self._lowest:
            return "below_lowest"
        if passes is not None and fails is not None and fails <= passes * (1 + self._tolerance):
            return "found"
        return "trials"

    def at(self, rate: float) -> list[SweepTrial]:
        """Returns the trials at one rate."""
        return self._at.get(rate, [])

    def _passing(self) -> list[float]:
        return [rate for rate, trials in self._at.items() if RateEvidence(trials).passed]

    def _failing(self) -> list[float]:
        return [
            rate
            for rate, trials in self._at.items()
            if not RateEvidence(trials).passed and any(trial.limit != "tester" for trial in trials)
        ]

    def _contested_rate(self) -> float | None:
        """Returns a rate to repeat because a lower rate fails while a higher one passes."""
        fails, best = self.fails, max(self._passing(), default=None)
        if fails is None or best is None or best < fails:
            return None
        few = min((fails, best), key=lambda rate: len(self._at[rate]))
        return few if len(self._at[few]) < SETTLES else None


async def sweep(
    spec: LoadSpec,
    play: Callable[[LoadSpec], Awaitable[LoadResult]],
    *,
    start_rate: float = 1.0,
    lowest: float = 0.05,
    highest: float = 1000.0,
    tolerance: float = 0.05,
    trial_s: float = 60.0,
    watch: Callable[[SweepTrial], None] | None = None,
    command: str = "",
) -> Sweep:
    """Finds the knee of a server: the highest rate at which it meets the objectives and keeps up.

    Args:
        spec: Settings of every trial except for rate, length and seed. Each trial has its own seed, so that a repeated
            trial is new evidence.
        play: Function that plays one spec.
        start_rate: Rate of the first trial, in sessions per second.
        lowest: Lowest rate to try.
        highest: Highest rate to try.
        tolerance: Relative tolerance of the knee.
        trial_s: Length of a trial, warm-up included.
        watch: Callback that receives every trial.
        command: Shell command, for the result file.

    Raises:
        InvalidRequest: The spec sets its own rate (users, trace or profile), or the bounds are not valid.
    """
    if spec.arrivals.users is not None or spec.shape.trace is not None or spec.arrivals.profile != "steady":
        raise InvalidRequest("A sweep sets the rate itself: leave out users, trace and profile.")
    if not trial_s > spec.bounds.warmup_s:
        raise InvalidRequest(f"A trial of {trial_s:g} s is over before its warm-up of {spec.bounds.warmup_s:g} s is.")
    search = KneeSearch(start_rate=start_rate, lowest=lowest, highest=highest, tolerance=tolerance)
    result: LoadResult | None = None
    while (rate := search.next_rate()) is not None:
        replace = msgspec.structs.replace
        result = await play(
            replace(
                spec,
                arrivals=replace(spec.arrivals, rate_per_s=rate),
                bounds=replace(spec.bounds, duration_s=trial_s, requests=None),
                seed=spec.seed + len(search.trials),
            )
        )
        trial = SweepTrial.of(result)
        search.record(rate, trial)
        if watch is not None:
            watch(trial)
    assert result is not None, "a search has at least one trial"
    return _sweep(search, spec.objectives, {**result.spec, "seed": spec.seed}, command=command, tolerance=tolerance)


def _sweep(
    search: KneeSearch, objectives: ObjectivesSpec, spec: dict[str, object], *, command: str, tolerance: float
) -> Sweep:
    timed = any(bound is not None for bound in (objectives.ttft_s, objectives.tpot_s, objectives.e2e_s))
    knee, fails = search.passes, search.fails
    goodput = None
    if knee is not None:
        at_knee = search.at(knee)
        goodput = float(np.mean([trial.goodput_per_s if timed else trial.requests_per_s for trial in at_knee]))
    return Sweep(
        format=FORMAT,
        spec=spec,
        command=command,
        tolerance=tolerance,
        objective=objectives.attainment if timed else None,
        trials=search.trials,
        knee_per_s=knee,
        fails_per_s=fails,
        goodput_per_s=goodput,
        reason=search.reason,
        verdict=_verdict(search, timed),
    )


def _verdict(search: KneeSearch, timed: bool) -> str:
    knee, fails, last = search.passes, search.fails, search.trials[-1]
    rule = "meets the objectives and keeps up" if timed else "keeps up"
    at_least = f"The knee is at least {knee:.3g} sessions/s" if knee is not None else "No rate has passed"
    match search.reason:
        case "found":
            verdict = f"The server {rule} at {knee:.3g} sessions/s and not at {fails:.3g}."
        case "at_highest":
            verdict = f"{at_least}: the highest rate allowed still passed. Raise `highest` to find it."
        case "below_lowest":
            verdict = f"The server fails even at {fails:.3g} sessions/s, the lowest rate allowed. Lower `lowest`."
        case "tester":
            verdict = (
                f"{at_least}; at {last.rate_per_s:.3g} the tester was the limit, not the server. Give the tester a "
                "faster core, or shorten what it has to read."
            )
        case "trials":
            verdict = f"{at_least}; after {len(search.trials)} trials that disagree the search stopped. Lengthen them."
    if any(trial.limit == "machine" for trial in search.trials):
        verdict += (
            " In some trials tester and server wanted the same cores; with the tester elsewhere it may be higher."
        )
    return verdict
