"""All rules together, and in which order their findings are told."""

from collections.abc import Sequence

from msgspec.structs import replace

from maitred.observe.diagnosis.capacity import CAPACITY
from maitred.observe.diagnosis.finding import DiagnosisFinding, FindingKind
from maitred.observe.diagnosis.snapshot import HealthSnapshot
from maitred.observe.diagnosis.surroundings import SURROUNDINGS

_SEEN_THROUGH_THE_GATEWAY = (FindingKind.UPSTREAM, FindingKind.SLOW_CLIENTS)


def diagnose(vitals: HealthSnapshot) -> list[DiagnosisFinding]:
    """What holds requests up, most important first.

    A gateway without CPU time makes servers behind it look slow, and clients before it: both are then suspected only
    half as much.
    """
    found = [finding for rule in (*CAPACITY, *SURROUNDINGS) for finding in rule(vitals)]
    if any(finding.kind is FindingKind.GATEWAY for finding in found):
        found = [
            replace(finding, weight=finding.weight / 2) if finding.kind in _SEEN_THROUGH_THE_GATEWAY else finding
            for finding in found
        ]
    return in_order(found)


def in_order(findings: Sequence[DiagnosisFinding]) -> list[DiagnosisFinding]:
    """The weightiest first; among equals, as they were found."""
    return sorted(findings, key=lambda finding: -finding.weight)
