"""Whose share a request uses, and how urgent it may be."""

from functools import lru_cache

from maitred.core.answer import InferenceRequest
from maitred.core.flow import Flow, FlowLevel, PriorityClass, class_of
from maitred.core.tenancy import Principal


def flow_of(principal: Principal, ask: InferenceRequest) -> Flow:
    """The flow of a request: as urgent as it asks to be, up to its tenant's ceiling."""
    asked = PriorityClass.STANDARD.priority if ask.priority is None else ask.priority
    ceiling = principal.priority_ceiling
    return _flow(principal.shares or (FlowLevel(principal.key),), asked if asked < ceiling else ceiling)


@lru_cache(maxsize=4096)
def _flow(path: tuple[FlowLevel, ...], priority: int) -> Flow:
    """One object for all requests of a flow: it is looked up several times on each one's way."""
    return Flow(path, class_of(priority))
