"""The result of a rehearsal: the JSON file that a report is made from."""

import time
from pathlib import Path
from typing import Any, Literal

import msgspec

import maitred as package
from maitred.load import result_file
from maitred.load.chaos.evidence import ChaosEvidence
from maitred.load.chaos.plan import ChaosPlan
from maitred.load.chaos.timeline import FaultLog
from maitred.load.measure.result import LoadResult

FORMAT = "maitred-chaos/1"
"""Version of the format: changes when an old reader would misread the file, not when fields are added."""


State = Literal["held", "broken", "unchecked"]


class InvariantResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of checking one invariant.

    Attributes:
        name: Name of the promise.
        state: `held`, `broken`, or `unchecked` where the evidence does not suffice.
        bound: Promised bound, in words.
        found: Observed value, or the reason why it could not be checked.
        examples: The first few violations.
    """

    name: str
    state: State
    bound: str
    found: str
    examples: list[str] = []


class ChaosRun(msgspec.Struct, kw_only=True):
    """Run of one chaos plan.

    Attributes:
        format: `FORMAT`.
        maitred: Version of the tester.
        command: Shell command that started the rehearsal.
        started: Start of the rehearsal, UTC, ISO 8601.
        seconds: Duration of the whole rehearsal.
        plan: The `ChaosPlan` as plain data; a secret appears as its reference.
        faults: Log of the faults in the plan's order; times are seconds since the start of the run with faults.
        invariants: Result of each promise.
        calm: Load result of the run without faults.
        chaos: Load result of the run with faults.
        last_lines: Last output of the installation; empty if chaos did not start it.
    """

    format: str
    maitred: str
    command: str
    started: str
    seconds: float
    plan: dict[str, Any]
    faults: list[FaultLog]
    invariants: list[InvariantResult]
    calm: LoadResult
    chaos: LoadResult
    last_lines: str = ""

    @classmethod
    def of(
        cls,
        plan: ChaosPlan,
        evidence: ChaosEvidence,
        invariants: list[InvariantResult],
        *,
        command: str,
        started_unix_s: float,
        seconds: float,
        calm: LoadResult,
        chaos: LoadResult,
        last_lines: str,
    ) -> "ChaosRun":
        """Combines the plan, the evidence and the verdicts to a result."""
        return cls(
            format=FORMAT,
            maitred=package.__version__,
            command=command,
            started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started_unix_s)),
            seconds=round(seconds, 3),
            plan=result_file.plain(plan),
            faults=evidence.faults,
            invariants=invariants,
            calm=calm,
            chaos=chaos,
            last_lines=last_lines,
        )

    @property
    def broken(self) -> list[InvariantResult]:
        """The promises that did not hold."""
        return [verdict for verdict in self.invariants if verdict.state == "broken"]

    @property
    def exit_code(self) -> int:
        """Exit code for the shell: 1 if a promise was broken."""
        return 1 if self.broken else 0

    def save(self, path: Path) -> None:
        """Writes the file atomically.

        Raises:
            InvalidRequest: The file cannot be written.
        """
        result_file.save(self, path)

    @classmethod
    def load(cls, path: Path) -> "ChaosRun":
        """Reads a file that `save` wrote.

        Raises:
            InvalidRequest: The file does not exist, is of another kind, or is damaged.
        """
        return result_file.load(path, cls, FORMAT, by="maitred load chaos", again="Play the plan again.")


MOST_EXAMPLES = 5


def decide(name: str, bound: str, found: str, violations: list[str]) -> InvariantResult:
    """Makes the result of a promise: broken if there is any violation, else held."""
    state: State = "broken" if violations else "held"
    return InvariantResult(name=name, state=state, bound=bound, found=found, examples=violations[:MOST_EXAMPLES])


def make_unchecked(name: str, bound: str, why: str) -> InvariantResult:
    """Makes the result `unchecked`, for the reason `why`."""
    return InvariantResult(name=name, state="unchecked", bound=bound, found=why)
