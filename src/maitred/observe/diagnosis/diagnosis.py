"""All rules together, and in which order their findings are told."""

from collections.abc import Sequence

from msgspec.structs import replace

from maitred.observe.diagnosis.capacity import CAPACITY
from maitred.observe.diagnosis.finding import Finding, Kind
from maitred.observe.diagnosis.surroundings import SURROUNDINGS
from maitred.observe.diagnosis.vitals import Vitals

_SEEN_THROUGH_THE_GATEWAY = (Kind.UPSTREAM, Kind.SLOW_CLIENTS)


def diagnose(vitals: Vitals) -> list[Finding]:
    """What holds requests up, most important first.

    A gateway without CPU time makes servers behind it look slow, and clients before it: both are then suspected only
    half as much.
    """
    found = [finding for rule in (*CAPACITY, *SURROUNDINGS) for finding in rule(vitals)]
    if any(finding.kind is Kind.GATEWAY for finding in found):
        found = [
            replace(finding, weight=finding.weight / 2) if finding.kind in _SEEN_THROUGH_THE_GATEWAY else finding
            for finding in found
        ]
    return in_order(found)


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """The weightiest first; among equals, as they were found."""
    return sorted(findings, key=lambda finding: -finding.weight)
