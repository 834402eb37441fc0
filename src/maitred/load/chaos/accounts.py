"""Promises about counts: nothing is billed twice, and little is computed for clients that have left."""

import math

from maitred.load.chaos.evidence import ChaosEvidence, ChaosPhase, text_of
from maitred.load.chaos.meter import TokenBill
from maitred.load.chaos.outcome import InvariantResult, decide, make_unchecked
from maitred.load.measure.record import RequestRecord, UserOutcome

_ROUNDING_TOKENS = 1
"""Rounding error per calibration, in tokens: its share of the bill is computed from a fit."""


def no_double_bill(evidence: ChaosEvidence) -> InvariantResult:
    """Checks that the meter shows no more than the clients have caused.

    A complete answer is billed exactly by its own usage. Of one that was cut, left or tried again, at most what was
    asked for, once per attempt: how much of it was made before it ended, only the server knows. So the calm run is the
    exact check. The run with faults finds tokens that are billed again after a retry, a restart or a disconnect.
    """
    name, bound = "no double bill", "the meter shows no more than the clients can have caused"
    if evidence.calm.billed is None or evidence.chaos.billed is None:
        return make_unchecked(name, bound, "The server has no meter: no maitred_output_tokens_total in its /metrics.")
    if not any(record.output_tokens for record in evidence.references.values()):
        return make_unchecked(name, bound, "The server's answers carry no usage to compare the meter with.")
    longest_tokens = max(record.prompt_tokens for record in evidence.references.values())
    violations, seen = [], []
    for words, phase in (("in calm", evidence.calm), ("with faults", evidence.chaos)):
        billed, most = phase.billed, _most(phase, evidence, longest_tokens)
        assert billed is not None
        for resource, have, may in (
            ("prompt", billed.prompt_tokens, most.prompt_tokens),
            ("output", billed.output_tokens, most.output_tokens),
        ):
            seen.append(f"{words} {have} {resource} tokens of at most {may}")
            if have > may:
                violations.append(f"{words} the meter shows {have - may} {resource} tokens more than can be explained.")
    return decide(name, bound, "; ".join(seen), violations)


def bounded_overshoot(evidence: ChaosEvidence, bound_tokens: float) -> InvariantResult:
    """Checks that clients that leave cost little: tokens that the engine computed but no client received."""
    name, bound = "bounded overshoot", f"at most {bound_tokens:g} tokens computed for nobody per departure"
    generated, phase = evidence.chaos.generated_tokens, evidence.chaos
    if generated is None:
        return make_unchecked(name, bound, "The server does not show what its engine has computed.")
    if not evidence.spec.target.stream:
        return make_unchecked(name, bound, "Answers are not streamed, so nobody can say how much of a cut one arrived.")
    delivered = phase.probes.output_tokens + sum(
        [
            *(
                _delivered_tokens(record, evidence.references.get((record.session, record.turn)))
                for record in phase.records
            ),
            *(_delivered_tokens(record, None) for record in phase.bursts),
        ]
    )
    departures = sum(map(_departures, phase.everyone))
    extra = max(0.0, generated - delivered)
    found = f"{generated} computed, {delivered:.0f} delivered, {departures} departures"
    if not departures:
        violations = [f"{extra:.0f} tokens more were computed than delivered, and nobody has left."] if extra else []
        return decide(name, bound, found, violations)
    per_departure = extra / departures
    violations = [f"{per_departure:.1f} tokens per departure."] if per_departure > bound_tokens else []
    return decide(name, bound, f"{found}: {per_departure:.1f} tokens each", violations)


def budgets_kept() -> InvariantResult:
    """Checks that no budget is overspent. Always unchecked: servers under test keep no budgets yet."""
    return make_unchecked("no budget overspent", "spent is at most granted", "This server keeps no budgets.")


def _most(phase: ChaosPhase, evidence: ChaosEvidence, longest_tokens: int) -> TokenBill:
    """Returns the highest bill that the clients of a phase can have caused."""
    rounding = TokenBill(prompt_tokens=_ROUNDING_TOKENS * math.ceil(phase.probes.output_tokens / 2))
    most = phase.probes + rounding
    for record in phase.records:
        reference = evidence.references.get((record.session, record.turn))
        most += _share(record, reference.prompt_tokens if reference else longest_tokens)
    for record in phase.bursts:
        most += _share(record, longest_tokens)
    return most


def _share(record: RequestRecord, prompt_tokens: int) -> TokenBill:
    """Returns one client's part of the bill; `prompt_tokens` replaces a missing usage."""
    lost = _departures(record)
    share = TokenBill(
        prompt_tokens=(record.prompt_tokens or prompt_tokens) * lost, output_tokens=record.asked_tokens * lost
    )
    if record.outcome is UserOutcome.COMPLETE:
        share += TokenBill(prompt_tokens=record.prompt_tokens, output_tokens=record.output_tokens)
    return share


def _departures(record: RequestRecord) -> int:
    """Counts the attempts whose client may have left before the end of the answer."""
    if record.outcome is UserOutcome.REFUSED or math.isnan(record.sent_s):
        return 0
    return record.attempts - (record.outcome is UserOutcome.COMPLETE)


def _delivered_tokens(record: RequestRecord, reference: RequestRecord | None) -> float:
    """Counts delivered tokens; for cut answers an estimate, as a piece of text can hold several tokens."""
    if record.outcome is UserOutcome.COMPLETE:
        return record.output_tokens or record.asked_tokens
    text, right = text_of(record), text_of(reference) if reference is not None else ""
    if reference is not None and text and right.startswith(text):
        return max(len(record.arrivals_s), reference.output_tokens * len(text) / len(right))
    return len(record.arrivals_s)
