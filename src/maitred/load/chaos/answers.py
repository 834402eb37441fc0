"""Promises about single answers: each is correct so far, reports whether it is complete, and ends."""

import math
from collections import Counter

from maitred.load.chaos.evidence import ChaosEvidence, Question, describe_request, text_of
from maitred.load.chaos.outcome import InvariantResult, decide, make_unchecked
from maitred.load.measure.record import RequestRecord, UserOutcome

_FINISHED = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter"})
"""Finish reasons that tell a client that the answer is whole."""


def same_answers(evidence: ChaosEvidence) -> InvariantResult:
    """Checks that no token is lost or doubled: an answer equals its reference, or is marked as cut.

    The reference is the answer to the same question in the calm run. A question of a conversation is checked only if
    all earlier answers matched their references, because the conversation is part of the question.
    """
    name, bound = "no token lost or doubled", "every answer is the calm run's, or the beginning of it"
    if not evidence.references:
        return make_unchecked(name, bound, "No answer of the calm run was whole, so there is nothing to compare with.")
    violations: list[str] = []
    whole = cut = without = 0
    strayed: set[int] = set()
    """Sessions whose conversation is no longer the one of the calm run."""
    for record in sorted(evidence.chaos.records, key=lambda record: (record.session, record.turn)):
        if record.session in strayed:
            without += 1
            continue
        reference = evidence.references.get((record.session, record.turn))
        problem = _against(reference, record) if reference is not None else _alone(record, exact=evidence.exact)
        if problem:
            violations.append(f"{describe_request(record)}: {problem}")
        if reference is None or record.outcome is not UserOutcome.COMPLETE or problem:
            strayed.add(record.session)
        without += reference is None
        whole += record.outcome is UserOutcome.COMPLETE and reference is not None
        cut += record.outcome is not UserOutcome.COMPLETE and bool(record.text) and reference is not None
    violations += [
        f"{describe_request(record)}: {problem}"
        for record in evidence.chaos.bursts
        if (problem := _alone(record, exact=evidence.exact))
    ]
    found = f"{whole} whole and {cut} cut answers compared, {len(violations)} wrong"
    if without:
        found += f"; {without} without a reference, judged by length alone"
    if not whole and not cut and not violations:
        return make_unchecked(name, bound, "No answer of the run with faults has a reference in the calm run.")
    return decide(name, bound, found, violations)


def every_request_ends(evidence: ChaosEvidence, bound_s: float) -> InvariantResult:
    """Checks that every request ends, and ends exactly once."""
    violations: list[str] = []
    longest_s = 0.0
    for record in evidence.chaos.everyone:
        took_s = record.ended_s - record.intended_s
        if record.outcome is UserOutcome.UNFINISHED or math.isnan(took_s):
            violations.append(f"{describe_request(record)}: it never ended.")
        elif took_s > bound_s:
            violations.append(f"{describe_request(record)}: it took {took_s:.1f} s.")
        longest_s = max(longest_s, 0.0 if math.isnan(took_s) else took_s)
    asked: Counter[Question] = Counter((record.session, record.turn) for record in evidence.chaos.records)
    violations += [
        f"session {session}, turn {turn}: it has {count} outcomes."
        for (session, turn), count in asked.items()
        if count > 1
    ]
    found = f"{len(evidence.chaos.everyone)} requests; the longest took {longest_s:.1f} s"
    return decide("every request ends", f"exactly once, within {bound_s:g} s", found, violations)


def _against(reference: RequestRecord, record: RequestRecord) -> str:
    """Returns the fault of an answer compared with its reference; empty: there is none."""
    text, right = text_of(record), text_of(reference)
    if record.outcome is UserOutcome.COMPLETE:
        if text != right:
            return f"It ended as complete, but {_difference(text, right)}."
        if record.output_tokens != reference.output_tokens:
            return f"The server counts {record.output_tokens} tokens in it, and {reference.output_tokens} in calm."
        return ""
    if not right.startswith(text):
        return f"It was cut, and {_difference(text, right)}."
    if record.finish_reason in _FINISHED and text != right:
        return f"It was cut, but a finish reason, {record.finish_reason!r}, says that it is whole."
    return ""


def _alone(record: RequestRecord, *, exact: bool) -> str:
    """Returns the fault of an answer that has no reference: only its length can be checked."""
    short = 0 < record.output_tokens != record.asked_tokens
    if exact and short and record.outcome is UserOutcome.COMPLETE:
        return f"It ended as complete with {record.output_tokens} tokens, and {record.asked_tokens} were asked for."
    return ""


def _difference(text: str, right: str) -> str:
    at = next((index for index, (one, other) in enumerate(zip(text, right, strict=False)) if one != other), None)
    if at is None:
        if len(text) < len(right):
            return f"its last {len(right) - len(text)} characters are missing"
        return f"{len(text) - len(right)} characters too many are at its end"
    return f"from character {at} it has {text[at : at + 20]!r} where {right[at : at + 20]!r} is right"
