"""Evidence of a rehearsal: everything that the verdicts are based on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from maitred.load.chaos.meter import NOTHING, TokenBill
from maitred.load.chaos.timeline import FaultLog
from maitred.load.measure.record import RequestRecord, UserOutcome
from maitred.load.spec import LoadSpec

Question = tuple[int, int]
"""Question of the load, identified by its session and turn."""


@dataclass(frozen=True)
class ChaosPhase:
    """Evidence of one run of the load.

    Attributes:
        records: Records of the requests of the main load.
        bursts: Records of the requests of `leave` and `stall` bursts.
        billed: Tokens that the server billed in this phase, by its meter; None: it has no meter.
        probes: Part of `billed` that the tester's own calibrations caused.
        generated_tokens: Tokens that the engine counted in this phase; None: it does not count.
    """

    records: list[RequestRecord]
    bursts: list[RequestRecord] = field(default_factory=list)
    billed: TokenBill | None = None
    probes: TokenBill = NOTHING
    generated_tokens: int | None = None

    @property
    def everyone(self) -> list[RequestRecord]:
        """Records of the main load and of all bursts."""
        return self.records + self.bursts


@dataclass(frozen=True)
class EndState:
    """State of the installation after the load.

    Attributes:
        answers: Whether the server answered at all.
        gauges: The server's gauges at the last scrape; empty: it exposes none.
        settled_s: Time from the end of the load until the server held nothing; None: something remained.
        started_here: Whether chaos ended the installation.
        exit_code: Exit code of the installation; None: it did not end.
        leftovers: Processes that the installation left behind.
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
        calm: Evidence of the run without faults.
        chaos: Evidence of the run with faults.
        faults: Log of the faults and their times.
        end: State of the installation after the load.
    """

    spec: LoadSpec
    calm: ChaosPhase
    chaos: ChaosPhase
    faults: list[FaultLog]
    end: EndState

    @cached_property
    def references(self) -> dict[Question, RequestRecord]:
        """The complete answers of the calm run, which are the references for all questions."""
        return {
            (record.session, record.turn): record
            for record in self.calm.records
            if record.outcome is UserOutcome.COMPLETE
        }

    @cached_property
    def exact(self) -> bool:
        """Whether answers have exactly the requested length; then answers without a reference are checked too."""
        counted = [record for record in self.references.values() if record.output_tokens]
        return bool(counted) and all(record.output_tokens == record.asked_tokens for record in counted)


def text_of(record: RequestRecord) -> str:
    """Returns the text of an answer as far as it arrived."""
    return "".join(record.text or ())


def describe_request(record: RequestRecord) -> str:
    """Describes a request in a few words."""
    return f"session {record.session}, turn {record.turn} ({record.outcome.value}, due at {record.intended_s:.1f} s)"
