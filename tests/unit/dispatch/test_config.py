"""By when a first token must come that nobody has asked for by a time."""

from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.dispatch.config import DispatchConfig

CONFIG = DispatchConfig(
    ttft_s={PriorityClass.INTERACTIVE: 2.0}, tenant_ttft_s={"acme": 5.0, "search": 1.0, "hurried": 0.5}
)


def within_s(*path, priority=PriorityClass.INTERACTIVE):
    return CONFIG.ttft_objective_s(Flow(tuple(map(FlowLevel, path)), priority))


def test_the_narrowest_name_counts_and_then_the_class():
    assert within_s("acme", "search", "hurried") == 0.5
    assert within_s("acme", "search", "key") == 1.0
    assert within_s("acme", "other", "key", priority=PriorityClass.BACKGROUND) == 5.0
    assert within_s("globex", "key") == 2.0


def test_without_a_name_or_a_class_there_is_no_hurry():
    assert within_s("globex", "key", priority=PriorityClass.BATCH) is None
