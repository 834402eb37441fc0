"""What a router remembers of earlier requests changes nothing for later ones."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.app.models.router import LOCAL_ONLY, Router
from maitred.core.errors import ContextLengthExceeded, MaitredError, ReplicaLost
from maitred.core.inference import InferenceRequest
from maitred.core.request import SamplingParams
from maitred.core.tenancy import Principal
from maitred.routing.catalog import Catalog
from tests.property.wire.test_routes import TABLES

NAMES = st.sampled_from(["a", "b", "c", "d", "x/a", "x/z", "zb", "z"])
ASKS = st.builds(
    InferenceRequest,
    model=NAMES,
    prompts=st.just(["Hi"]),
    sampling=st.builds(SamplingParams, st.just(1), st.just(0), top_logprobs=st.sampled_from([None, None, 1])),
    needs=st.sampled_from([(), (), ("tools",)]),
    local_only=st.sampled_from([False, False, True]),
    regions=st.sampled_from([None, None, frozenset({"eu"})]),
)
CALLERS = st.builds(
    Principal,
    key=st.just("k"),
    tenants=st.just(("acme",)),
    scopes=st.just(frozenset()),
    models=st.none() | st.frozensets(NAMES, max_size=4),
    regions=st.sampled_from([None, None, frozenset({"us"})]),
    tags=st.sampled_from([frozenset(), frozenset(), frozenset({LOCAL_ONLY})]),
)
FAILURES = (ReplicaLost(), ContextLengthExceeded("Too long."), ReplicaLost())


def gone(router, ask, principal):
    """All targets of a request while each of them fails it, or the error instead."""
    try:
        plan = router.route(ask, principal)
        targets = [plan.first_target()]
        targets += [plan.next_target(failure) for failure in FAILURES]
    except MaitredError as error:
        return type(error), error.message
    return targets, plan.excluded, plan.tried, plan.name


@given(table=TABLES, requests=st.lists(st.tuples(ASKS, CALLERS), min_size=1, max_size=12))
def test_who_asks_after_others_is_sent_where_the_first_would_be(table, requests):
    old = Router(Catalog([]), table)
    for ask, principal in requests:
        assert gone(old, ask, principal) == gone(Router(Catalog([]), table), ask, principal)
