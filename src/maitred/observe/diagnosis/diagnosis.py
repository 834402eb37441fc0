"""Diagnosis: runs all rules and sorts their findings."""

from collections.abc import Sequence

from msgspec.structs import replace

from maitred.observe.diagnosis.capacity import CAPACITY_RULES
from maitred.observe.diagnosis.finding import DiagnosisFinding, FindingKind
from maitred.observe.diagnosis.snapshot import HealthSnapshot
from maitred.observe.diagnosis.surroundings import ENVIRONMENT_RULES

_AFFECTED_BY_GATEWAY = (FindingKind.UPSTREAM, FindingKind.SLOW_CLIENTS)


def diagnose(snapshot: HealthSnapshot) -> list[DiagnosisFinding]:
    """Finds what delays requests, most important first.

    A gateway without CPU time makes upstream servers look slow, and clients too: the weight of both is then halved.
    """
    findings = [finding for rule in (*CAPACITY_RULES, *ENVIRONMENT_RULES) for finding in rule(snapshot)]
    if any(finding.kind is FindingKind.GATEWAY for finding in findings):
        findings = [
            replace(finding, weight=finding.weight / 2) if finding.kind in _AFFECTED_BY_GATEWAY else finding
            for finding in findings
        ]
    return sort_findings(findings)


def sort_findings(findings: Sequence[DiagnosisFinding]) -> list[DiagnosisFinding]:
    """Sorts findings by falling weight; equal ones keep their order."""
    return sorted(findings, key=lambda finding: -finding.weight)
