"""The highest rate that a server sustains, found with few trials although each of them is noisy.

`KneeSearch` decides and does no I/O; `sweep` plays what it asks for. Latency over load is flat until the server is full
and then a wall, so the search brackets the wall by doubling (or halving) and halves the bracket in log space.
"""

from pathlib import Path
from typing import Literal

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.load.cost import Limit

FORMAT = "maitred-sweep/1"

Reason = Literal["found", "at_highest", "below_lowest", "tester", "trials"]
"""Why a search ended: the knee is known to the tolerance; the highest rate allowed still passed; the lowest allowed did
not; the tester was the limit; the trials were used up."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run at one rate.

    Attributes:
        rate_per_s: Sessions per second that were due.
        objective: Share of the requests that must meet the objectives; None: no objectives, only keeping up counts.
        judged, met: Counted requests that were not cancelled, and those of them that met the objectives.
        due: Requests due in the second half of the window.
        growth: By how many the open requests grew from the middle of the window to its end. A server that keeps up ends
            as many as are due, so that this is 0 but for chance.
        growth_deviation: Standard deviation that chance gives `growth`.
        requests_per_s, output_tokens_per_s, goodput_per_s: Of the run's summary.
        ttft_p50_s, ttft_p95_s, itl_p95_s: Of the same; None: no such times.
        failed: Share of the counted requests neither complete nor cancelled.
        limit: Of the tester.
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

    @property
    def attainment(self) -> float:
        """Share that met the objectives."""
        return self.met / self.judged if self.judged else 0.0

    @property
    def passed(self) -> bool:
        """Whether the rate is sustained, by this trial alone."""
        return Evidence([self]).passed


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """What a search has found.

    Attributes:
        format: `FORMAT`.
        spec: Of all trials but for their rate, in plain data.
        command: Of the shell; empty: not from a shell.
        tolerance: Of the knee, relative.
        objective: As in `Trial`.
        trials: In the order in which they were played.
        knee_per_s: Highest rate known to pass; None: none passed.
        fails_per_s: Lowest rate known to fail; None: none failed. The knee lies between the two.
        goodput_per_s: At the knee, mean over its trials. Without objectives: requests per second there.
        reason: Why the search ended.
        verdict: The same for people, in a sentence.
    """

    format: str
    spec: dict[str, object]
    command: str
    tolerance: float
    objective: float | None
    trials: list[Trial]
    knee_per_s: float | None
    fails_per_s: float | None
    goodput_per_s: float | None
    reason: Reason
    verdict: str

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        try:
            path.write_bytes(msgspec.json.encode(self))
        except OSError as error:
            raise InvalidRequest(f"Cannot write {path}: {error.strerror}. Name another file.") from None

    @classmethod
    def load(cls, path: Path) -> "Sweep":
        """Reads what `save` wrote.

        Raises:
            InvalidRequest: It is not such a file.
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


class Evidence:
    """What the trials at one rate say together.

    Args:
        trials: At least one, all at the same rate.
    """

    def __init__(self, trials: list[Trial]) -> None:
        self.trials = trials

    @property
    def keeps_up(self) -> bool:
        """Whether the open requests grew by less than 5 % of what was due."""
        return self._growth_score <= 0

    @property
    def meets(self) -> bool:
        """Whether enough requests met the objectives; without objectives True."""
        return self._attainment_score >= 0

    @property
    def passed(self) -> bool:
        """Whether the rate is sustained."""
        return self.keeps_up and self.meets

    @property
    def sure(self) -> bool:
        """Whether chance is unlikely to have decided (90 %, two-sided)."""
        if self.passed:
            return self._growth_score < -SURE and self._attainment_score > SURE
        return self._growth_score > SURE or self._attainment_score < -SURE

    @property
    def _growth_score(self) -> float:
        """Growth beyond what is tolerated, in standard deviations."""
        excess = sum(trial.growth - TOLERATED_GROWTH * trial.due for trial in self.trials)
        return excess / max(sum(trial.growth_deviation**2 for trial in self.trials) ** 0.5, 1e-9)

    @property
    def _attainment_score(self) -> float:
        """Attainment above the objective, in standard deviations that a rate exactly at it would show."""
        objective = self.trials[0].objective
        if objective is None:
            return 1e9
        judged = sum(trial.judged for trial in self.trials)
        excess = sum(trial.met for trial in self.trials) - objective * judged
        return excess / max((judged * objective * (1 - objective)) ** 0.5, 1e-9) if judged else -1e9


TOLERATED_GROWTH = 0.05
"""Share of the arrivals that may stay unanswered: below it a server counts as keeping up."""

SURE = 1.645
"""Standard deviations, 90 % two-sided."""
