"""What is counted some at a time is what is counted one by one, whenever somebody looks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.context import ModelSelection, Outcome, RejectedAnswer, RequestContext
from maitred.core.errors import QueueFull
from maitred.core.flow import PriorityClass
from maitred.core.inference import InferenceRequest
from maitred.core.request import FinishReason, SamplingParams, Usage
from maitred.core.tenancy import Principal
from maitred.observe.config import MetricsConfig, SloConfig
from maitred.observe.metrics.registry import Metrics
from maitred.observe.observer_batch import ObserverBatch
from maitred.observe.recent import RecentTraffic
from maitred.observe.timelines import TimelineBuffer
from maitred.wire.admin.responses import encode
from tests.support.clock import FakeClock

SLOS = {
    "answered": SloConfig(indicator="availability", objective=0.9),
    "soon": SloConfig(indicator="ttft", objective=0.9, within_s=1.0, model="small"),
    "smooth": SloConfig(indicator="itl", objective=0.9, within_s=0.1),
}
TIMES_S = st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0, 7.5, 200.0])
TOKENS = st.sampled_from([0, 1, 16, 300, 60_000])
ASK = InferenceRequest(model="any", prompts=["x"], sampling=SamplingParams(max_tokens=0, seed=0))


@st.composite
def contexts(draw):
    """One request, as it may end."""
    context = RequestContext(
        draw(st.sampled_from("abcdef")), draw(TIMES_S), route=draw(st.sampled_from(["/v1/models", "/v1/x"]))
    )
    context.model = draw(st.sampled_from(["", "small", "large"]))
    tenant = draw(st.sampled_from(["", "one", "two", "three"]))
    if tenant:
        context.principal = Principal(key="k", tenants=(f"team-{tenant}", tenant), scopes=frozenset())
    context.priority = draw(st.sampled_from([None, *PriorityClass]))
    context.prompt_tokens, context.completion_tokens = draw(TOKENS), draw(TOKENS)
    context.cached_tokens = min(draw(TOKENS), context.prompt_tokens)
    context.request = draw(
        st.sampled_from([None, ASK, InferenceRequest("any", [[1]], ASK.sampling, max_tokens=64, stops=(".",))])
    )
    if draw(st.booleans()):
        context.first_token_s = context.started_s + draw(TIMES_S)
        context.gaps_s = draw(st.lists(TIMES_S, max_size=100))
        context.finish_reasons = draw(st.lists(st.sampled_from(FinishReason), max_size=2))
    context.waited_ms = draw(st.sampled_from([{}, {"slots": 12.5, "kv": 0.1}]))
    context.degraded = draw(st.sampled_from([[], ["max_tokens=16", "model=small"]]))
    if draw(st.integers(0, 3)) == 3:
        context.failure, context.refused_by = QueueFull(), draw(st.sampled_from(["", "tokens_per_minute"]))
        context.recoveries, context.continued, context.hedged, context.stalled = 2, 1, "second", True
        context.clamped_max_tokens, context.selection = 5, ModelSelection("auto", "small", "code")
        context.fallbacks, context.rejected_answers = (
            ["general=large"],
            [RejectedAnswer("small", "schema", Usage(3, 4), replaced=True)],
        )
    outcome = draw(st.sampled_from(Outcome))
    context.close(outcome, 200 if outcome is Outcome.FINISHED else 429, (context.first_token_s or 0.0) + draw(TIMES_S))
    return context


class Watchers:
    """All observers, called at once or through a batch."""

    def __init__(self, batch):
        clock = FakeClock()
        self.metrics = Metrics(lambda: 0, dict, config=MetricsConfig(tenants=2), slos=SLOS, clock=clock, batch=batch)
        self.timelines, self.recent = TimelineBuffer(4, clock, batch), RecentTraffic(clock)
        at_once = [*self.metrics.observers, self.timelines, self.recent]
        self.observers = at_once if batch is None else [batch, self.recent.batch]

    def on_request_end(self, context):
        for observer in self.observers:
            observer.on_request_end(context)

    def seen(self, what):
        match what:
            case "scrape":
                lines = self.metrics.render()[0].decode().splitlines()
                # What is asked for at each scrape anew is not of requests.
                kept = [line for line in lines if not line.startswith(("#", "maitred_process", "maitred_event_loop"))]
                # Sums of floats depend on the order in which they are added, by their last digit.
                pairs = [line.rsplit(" ", 1) for line in kept]
                return {series: pytest.approx(float(value), rel=1e-12, nan_ok=True) for series, value in pairs}
            case "list":
                return encode([*self.timelines.latest()])
            case "timeline":
                return [encode(self.timelines.get(head.id)) for head in self.timelines.latest()]
            case "tenants":
                return [*self.recent.tenants.items()]
            case "refusals":
                return [*self.recent.rejections.items()]
            case "second":
                return self.recent.tick(0, 0)


LOOKS = st.sampled_from(["scrape", "list", "timeline", "tenants", "refusals", "second"])


@given(st.lists(st.one_of(contexts(), LOOKS), max_size=100))
def test_nobody_can_tell_that_requests_are_counted_some_at_a_time(history):
    at_once, some = Watchers(None), Watchers(ObserverBatch())
    for one in [*history, "scrape", "timeline", "tenants", "refusals", "second"]:
        if isinstance(one, RequestContext):
            at_once.on_request_end(one)
            some.on_request_end(one)
        else:
            assert some.seen(one) == at_once.seen(one), one


def test_what_was_asked_is_not_kept_for_long():
    sizes = []

    class Observer:
        def on_request_end(self, *contexts):
            sizes.append(len(contexts))

    batch = ObserverBatch(Observer())
    for _ in range(40):
        batch.on_request_end(RequestContext("r", 0.0, prompt_tokens=20_000))
    assert sizes == [3] * 13
    for _ in range(100):
        batch.on_request_end(RequestContext("r", 0.0))
    assert sizes[13:] == [32, 32, 32]
    batch.flush_pending()
    assert sum(sizes) == 140
