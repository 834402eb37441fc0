"""Synthetic evidence: a sound rehearsal, which each test then spoils in one way."""

from array import array

from msgspec.structs import replace

from maitred.load.chaos.evidence import ChaosEvidence, ChaosPhase, EndState
from maitred.load.chaos.meter import TokenBill
from maitred.load.chaos.timeline import FaultLog
from maitred.load.measure.record import RequestRecord, UserOutcome
from maitred.load.spec import ArrivalsSpec, LoadSpec, StopCondition

TOKENS = 4
PROMPT_TOKENS = 10
SPEC = LoadSpec(arrivals=ArrivalsSpec(users=2), bounds=StopCondition(duration_s=20))


def answered(session, turn=0, *, due_s=0.0, words=TOKENS, **fields):
    """A whole answer: one word per token, one tenth of a second each."""
    text = [f"{session}.{turn}.{number} " for number in range(words)]
    times = array("d", [due_s + 0.1 * (number + 1) for number in range(words)])
    values = {
        "session": session,
        "turn": turn,
        "tenant": "default",
        "intended_s": due_s,
        "asked_tokens": TOKENS,
        "sent_s": due_s,
        "headers_s": due_s,
        "ended_s": due_s + 0.1 * words,
        "arrivals_s": times,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": words,
        "attempts": 1,
        "status": 200,
        "finish_reason": "length",
        "outcome": UserOutcome.COMPLETE,
        "text": text,
    }
    return RequestRecord(**(values | fields))


def cut(session, turn=0, *, words=2, due_s=0.0, **fields):
    """The beginning of one; a broken-off answer brings no usage."""
    values = {"outcome": UserOutcome.CUT, "finish_reason": "", "output_tokens": 0, "prompt_tokens": 0, "error": "gone"}
    return answered(session, turn, words=words, due_s=due_s, **(values | fields))


def bill(records):
    return TokenBill(
        prompt_tokens=sum(record.prompt_tokens for record in records),
        output_tokens=sum(record.output_tokens for record in records),
    )


def phase(records, **fields):
    values = {"billed": bill(records), "generated_tokens": sum(len(record.arrivals_s) for record in records)}
    return ChaosPhase(records=records, **(values | fields))


def steady(count=40, **fields):
    """So many answers, one after the other every half second."""
    return [answered(session, due_s=session * 0.5, **fields) for session in range(count)]


def fault(over_s=5.0, **fields):
    values = {
        "number": 0,
        "kind": "kill",
        "target": "engine",
        "planned_s": over_s,
        "began_s": over_s,
        "ended_s": over_s,
    }
    return FaultLog(**(values | fields))


def evidence(chaos=None, *, calm=None, faults=(), end=None, spec=SPEC, **fields):
    calm = steady() if calm is None else calm
    chaos = steady() if chaos is None else chaos
    return ChaosEvidence(
        spec=spec,
        calm=phase(calm),
        chaos=phase(chaos, **fields),
        faults=list(faults),
        end=end or EndState(settled_s=0.1),
    )


def with_users(users):
    arrivals = ArrivalsSpec(users=users) if users else ArrivalsSpec(rate_per_s=2)
    return replace(SPEC, arrivals=arrivals)
