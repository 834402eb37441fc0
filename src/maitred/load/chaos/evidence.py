"""Evidence of a rehearsal: all that a verdict may rest on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from maitred.load.chaos.meter import NOTHING, TokenBill
from maitred.load.chaos.timeline import FaultLog
from maitred.load.measure.record import RequestRecord, UserOutcome
from maitred.load.spec import LoadSpec

Question = tuple[int, int]
"""Session and turn."""


@dataclass(frozen=True)
class ChaosPhase:
    """One playing of the load.

    Attributes:
        records: What its users saw.
        bursts: What the users of `leave` and `stall` saw.
        billed: By the server's meter, over the phase; None: it keeps none.
        probes: What of that the tester's own calibrations explain.
        generated_tokens: By the engine's own count, over the phase; None: it keeps none.
    """

    records: list[RequestRecord]
    bursts: list[RequestRecord] = field(default_factory=list)
    billed: TokenBill | None = None
    probes: TokenBill = NOTHING
    generated_tokens: int | None = None

    @property
    def everyone(self) -> list[RequestRecord]:
        """Records of all users."""
        return self.records + self.bursts


@dataclass(frozen=True)
class EndState:
    """How it looked after the load.

    Attributes:
        answers: Whether the server answered at all.
        gauges: Its own figures at the last look; empty: it shows none.
        settled_s: From the end of the load until nothing was left; None: something was.
        started_here: Whether chaos ended the installation.
        exit_code: Of the installation; None: it did not end.
        leftovers: What it left behind.
    """

    answers: bool = True
    gauges: Mapping[str, float] = field(default_factory=dict)
    settled_s: float | None = None
    started_here: bool = True
    exit_code: int | None = 0
    leftovers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ChaosEvidence:
    """Evidence of both phases of a rehearsal, and of its end.

    Attributes:
        spec: The load that was played twice.
        calm: Without faults.
        chaos: With them.
        faults: What was done when.
        end: What was left.
    """

    spec: LoadSpec
    calm: ChaosPhase
    chaos: ChaosPhase
    faults: list[FaultLog]
    end: EndState

    @cached_property
    def references(self) -> dict[Question, RequestRecord]:
        """The whole answers of the calm run: what each question must get."""
        return {
            (record.session, record.turn): record
            for record in self.calm.records
            if record.outcome is UserOutcome.COMPLETE
        }

    @cached_property
    def exact(self) -> bool:
        """Whether this server gives answers of the length asked for; then one without reference can be judged too."""
        counted = [record for record in self.references.values() if record.output_tokens]
        return bool(counted) and all(record.output_tokens == record.asked_tokens for record in counted)


def text_of(record: RequestRecord) -> str:
    """The answer as far as it came."""
    return "".join(record.text or ())


def describe_request(record: RequestRecord) -> str:
    """A request in a few words."""
    return f"session {record.session}, turn {record.turn} ({record.outcome.value}, due at {record.intended_s:.1f} s)"
