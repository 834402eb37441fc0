"""Whose share a request uses, and how urgent it may be."""

from maitred.core.answer import Ask
from maitred.core.flow import Flow, PriorityClass, Share, class_of
from maitred.core.tenancy import Principal


def flow_of(principal: Principal, ask: Ask) -> Flow:
    """The flow of a request: as urgent as it asks to be, up to its tenant's ceiling."""
    asked = PriorityClass.STANDARD.priority if ask.priority is None else ask.priority
    return Flow(principal.shares or (Share(principal.key),), class_of(min(asked, principal.priority_ceiling)))
